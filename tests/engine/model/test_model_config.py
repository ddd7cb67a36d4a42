"""What a config.json and a checkpoint mean, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contract.adapters.base_shape import BaseShape, context_length
from contract.adapters.families import FAMILIES as KNOWN
from contract.adapters.families import WITH_IMAGES
from contract.layer_shapes import LayerShape
from engine import Engine, EngineConfig, UnsupportedModel
from engine.adapters import plan
from engine.model.config import ModelConfig
from engine.model.families import PLANS
from engine.model.hf_weights import share_model
from engine.model.rope import LayerRopes, Rotation
from engine.model.weights import load_weights
from kernels.delta import DeltaShape
from kernels.experts import ExpertShape
from tests.engine.conftest import prompt, request, run
from tests.engine.model.families import COMMON, FAMILIES, LLAMA3, YARN, YARN_OPTIONS, save_family

MISTRAL = {**COMMON, "model_type": "mistral", "rms_norm_eps": 1e-5}
LLAMA = {**COMMON, "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN = {**COMMON, "model_type": "qwen2", "rms_norm_eps": 1e-5}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a family of FAMILIES."""
    model_type, fields = FAMILIES[name]
    eps = "layer_norm_eps" if model_type == "cohere2" else "rms_norm_eps"
    return {**COMMON, "model_type": model_type, eps: 1e-5, **fields, **changes}


# As their authors published them, less what only names things.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-3.1-8b": (
        {
            "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
            "transformers_version": "4.42.3", "vocab_size": 128256,
        },
        {"head_dim": 128, "max_positions": 131072, "eos_token_ids": (128001, 128008, 128009)},
    ),
    "mistral-7b-v0.1": (
        {
            "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        {"windows": (4096,) * 32, "rotations": (Rotation(theta=10000.0),) * 32},
    ),
    "mistral-nemo": (
        {
            "model_type": "mistral", "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 131072,
        },
        {"windows": (), "head_dim": 128, "q_size": 4096},
    ),
    "qwen2.5-7b-instruct with yarn": (
        {
            "model_type": "qwen2", "attention_dropout": 0.0, "hidden_act": "silu",
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 131072, "tie_word_embeddings": False,
            "use_sliding_window": False, "use_mrope": False, "vocab_size": 152064,
            "rope_scaling": {
                "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
            },
        },
        {"windows": (), "qkv_bias": True, "o_bias": False, "max_positions": 131072},
    ),
    "qwen3-0.6b": (
        {
            "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"qk_norm": "head", "qkv_bias": False, "q_size": 2048, "tie_embeddings": True},
    ),
    "smollm3-3b": (
        {
            "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
            "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
            "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
        },
        {"rotations": (*[Rotation(theta=5e6)] * 3, None) * 9, "tie_embeddings": True},
    ),
    "granite-3.3-8b-instruct": (
        {
            "model_type": "granite", "attention_bias": False, "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 12800, "logits_scaling": 16.0,
            "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
            "tie_word_embeddings": True, "vocab_size": 49159,
        },
        {"embedding_scale": 12 / 0.22, "logit_scale": 1 / 16, "attention_scale": 1 / 128},
    ),
    "phi-4-mini-instruct": (
        {
            "model_type": "phi3", "attention_bias": False, "auto_map": {"AutoConfig": "x.Config"},
            "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
            "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
            "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope",
            },
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        {"max_positions": 4096, "windows": (), "head_dim": 128},
    ),
    "gemma-3-1b-it": (
        {
            "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
            "cache_implementation": "hybrid", "eos_token_id": [1, 106],
            "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
            "intermediate_size": 6912, "max_position_embeddings": 32768,
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
            "sliding_window_pattern": 6, "vocab_size": 262144,
        },
        {
            "windows": (((512,) * 5 + (None,)) * 5)[:26], "tie_embeddings": True,
            "attention_scale": 1 / 16, "embedding_scale": 1152**0.5,
            "rotations": (((Rotation(theta=1e4),) * 5 + (Rotation(theta=1e6),)) * 5)[:26],
        },
    ),
    "gemma-3-4b-it": (
        {
            "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000,
            "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
            "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        {
            "has_images": True, "vocab_size": 262208, "num_heads": 8, "num_kv_heads": 4,
            "head_dim": 256, "max_positions": 131072, "tie_embeddings": True,
        },
    ),
    "exaone-4.0-32b, shortened": (
        {
            "model_type": "exaone4", "hidden_act": "silu", "hidden_size": 5120, "head_dim": 128,
            "intermediate_size": 27392, "max_position_embeddings": 131072,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_attention_heads": 40, "num_hidden_layers": 4, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": 4096,
            "sliding_window_pattern": "LLLG", "tie_word_embeddings": False, "vocab_size": 102400,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        {"windows": (4096, 4096, 4096, None), "max_positions": 131072},
    ),
    "command-r7b, shortened": (
        {
            "model_type": "cohere2", "attention_bias": False, "cache_implementation": "hybrid",
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4,
            "logit_scale": 0.25, "max_position_embeddings": 132096, "num_attention_heads": 32,
            "num_hidden_layers": 4, "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
            "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
            "use_embedding_sharing": True, "use_gated_activation": True,
            "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
        },
        {"windows": (4096, 4096, 4096, None), "logit_scale": 0.25, "tie_embeddings": True},
    ),
    "glm-4-9b-0414": (
        {
            "model_type": "glm4", "attention_bias": False, "eos_token_id": [151329, 151336],
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 13696, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "vocab_size": 151552,
        },
        {"rotations": (Rotation(theta=1e4, share=0.5, is_interleaved=True),) * 40},
    ),
    "qwen3.5-9b, shortened": (
        {
            "model_type": "qwen3_5", "image_token_id": 248056, "tie_word_embeddings": False,
            "video_token_id": 248057, "vision_end_token_id": 248054,
            "vision_start_token_id": 248053,
            "text_config": {
                "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
                "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
                "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
                "num_attention_heads": 16, "num_hidden_layers": 4, "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06, "vocab_size": 248320,
                "rope_parameters": {
                    "mrope_interleaved": True, "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
                },
            },
            "vision_config": {"depth": 27, "model_type": "qwen3_5_vision"},
        },
        {
            "has_images": True, "max_positions": 262144, "delta_layers": (0, 1, 2),
            "delta": DeltaShape(16, 32, 128, 128, 4), "is_gated": True, "tie_embeddings": False,
            "rotations": (None, None, None, Rotation(theta=1e7, share=0.25)), "q_rows": 8192,
        },
    ),
    "qwen3.5-35b-a3b, shortened": (
        {
            "model_type": "qwen3_5_moe", "image_token_id": 248056, "tie_word_embeddings": False,
            "text_config": {
                "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
                "hidden_act": "silu", "hidden_size": 2048,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "mlp_only_layers": [], "moe_intermediate_size": 512,
                "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1,
                "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 4,
                "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
            },
            "vision_config": {"depth": 27, "model_type": "qwen3_5_moe_vision"},
        },
        {
            "experts": ExpertShape(256, 8, 512, is_normed=True, has_shared=True),
            "expert_layers": (0, 1, 2, 3), "delta_layers": (0, 1, 2), "intermediate_size": 512,
            "tie_embeddings": False, "max_positions": 32768,
        },
    ),
    "gemma-4 of E2B's shapes, shortened": (
        {
            "model_type": "gemma4", "audio_config": {"model_type": "gemma4_audio"},
            "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999,
            "eoa_token_index": 258883, "eoi_token_id": 258882, "image_token_id": 258880,
            "text_config": {
                "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False,
                "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
                "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
                "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
                "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
                "max_position_embeddings": 131072, "model_type": "gemma4_text",
                "num_attention_heads": 8, "num_experts": None, "num_hidden_layers": 10,
                "num_key_value_heads": 1, "num_kv_shared_layers": 5, "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "full_attention": {
                        "partial_rotary_factor": 0.25, "rope_theta": 1e6,
                        "rope_type": "proportional",
                    },
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                },
                "sliding_window": 512, "use_bidirectional_attention": None,
                "use_double_wide_mlp": True, "vocab_size": 262144,
                "vocab_size_per_layer_input": 262144,
            },
            "tie_word_embeddings": True, "video_token_id": 258884,
            "vision_config": {"model_type": "gemma4_vision"},
        },
        {
            "shapes": (
                *[LayerShape(256, 1, 6144, False)] * 4, LayerShape(512, 1, 6144, True),
                *[LayerShape(256, 1, 12288, False, keys_of=3)] * 4,
                LayerShape(512, 1, 12288, True, keys_of=4),
            ),
            "kv_page": (6, 1, 256), "logit_cap": 30.0, "per_layer": (262144, 256),
            "windows": (*[512] * 4, None) * 2, "has_images": True, "tie_embeddings": True,
        },
    ),
    "gpt-oss-20b, shortened": (
        {
            "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 200002,
            "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 131072, "num_attention_heads": 64,
            "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8,
            "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                "quant_method": "mxfp4",
            },
            "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
            },
            "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
        {
            "experts": ExpertShape(
                32, 4, 2880, is_normed=True, has_biases=True, is_fp4=True, limit=7.0, alpha=1.702
            ),
            "expert_layers": (0, 1), "windows": (128, None), "has_sinks": True, "scheme": None,
            "qkv_bias": True, "o_bias": True, "q_size": 4096, "max_positions": 131072,
        },
    ),
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
        },
        {
            "experts": ExpertShape(128, 8, 768, is_normed=True),
            "expert_layers": tuple(range(48)), "q_size": 4096, "qk_norm": "head", "windows": (),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    fields, expected = PUBLISHED[name]
    config = ModelConfig.from_fields(fields, fields.get("eos_token_id"))
    found = {key: getattr(config if hasattr(config, key) else config.plan, key) for key in expected}
    assert found == expected
    assert context_length(fields) == config.max_positions  # what the worker and the gateway say


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3},
        LLAMA3,
        {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 9},
        YARN,
        YARN_OPTIONS,
        {**YARN, "attention_factor": 0.25},
        {**YARN, "beta_fast": 1000, "beta_slow": 900},
        {**YARN, "mscale": 0.5},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 2.5},
        {**YARN, "truncate": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [100.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rope_tables_are_hugging_faces(rope: dict[str, Any], theta: float, head_dim: int) -> None:
    fields = {**COMMON, "head_dim": head_dim, "rope_parameters": {**rope, "rope_theta": theta}}
    theirs = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **fields))
    config = ModelConfig.from_fields({**LLAMA, **fields}, None)
    ropes = LayerRopes(config.head_dim, config.plan.rotations, 300, torch.device("cpu"))
    ropes.extend_to(300)
    [tables] = set(ropes.layers)
    assert tables is not None
    expected = theirs(torch.zeros(1), torch.arange(300)[None])
    assert torch.equal(tables.cos, expected[0][0])
    assert torch.equal(tables.sin, expected[1][0])


@pytest.mark.parametrize(
    ("rope", "param"),
    [
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({**LLAMA3, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": None}, "factor"),
    ],
    ids=str,
)
def test_rope_parameters_that_hugging_face_refuses(rope: dict[str, Any], param: str) -> None:
    fields = {**COMMON, "rope_parameters": {**rope, "rope_theta": 100.0}}
    with pytest.raises(Exception, match=r"factor|NoneType|original_max_position"):
        LlamaRotaryEmbedding(AutoConfig.for_model("llama", **fields))
    with pytest.raises(UnsupportedModel) as raised:
        ModelConfig.from_fields({**LLAMA, **fields}, None)
    assert raised.value.param == param


def test_the_old_names_mean_the_same() -> None:
    new = ModelConfig.from_fields({**LLAMA, "rope_parameters": {**YARN, "rope_theta": 7.0}}, None)
    old_scaling = {**YARN, "type": YARN["rope_type"]}
    del old_scaling["rope_type"]
    old = ModelConfig.from_fields({**LLAMA, "rope_theta": 7.0, "rope_scaling": old_scaling}, None)
    assert new == old


def test_yarn_reaches_as_far_as_its_factor() -> None:
    fields = {**LLAMA, "rope_parameters": {**YARN, "factor": 40}}
    config = ModelConfig.from_fields(fields, None)
    assert config.max_positions == context_length(fields) == 32 * 40


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({**MISTRAL}, ()),  # transformers' default of 4096 is longer than any context here
        ({**MISTRAL, "max_position_embeddings": 5000}, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None, "max_position_embeddings": 5000}, ()),
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**MISTRAL, "sliding_window": 160}, ()),
        ({**QWEN, "sliding_window": 8}, ()),
        ({**QWEN, "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        (
            {**QWEN, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8),
        ),
        (
            {
                **QWEN, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({**QWEN, "sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, ()),
        ({**QWEN, "layer_types": ["full_attention"] * 2}, ()),
    ],
)  # fmt: skip
def test_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = ModelConfig.from_fields(fields, None)
    assert [config.window(i) for i in range(2)] == list(windows or (None, None))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**LLAMA, "model_type": "gemma2"}, "model_type"),
        ({**LLAMA, "model_type": ["llama"]}, "model_type"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**LLAMA, "head_dim": 15}, "num_key_value_heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size"),
        ({**LLAMA, "rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ({k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"}, "num_key_value_heads"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types"),
        ({**QWEN, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({**QWEN, "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({**QWEN, "layer_types": 2}, "layer_types"),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers"),
        ({**QWEN, "use_mrope": True}, "use_mrope"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": True}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "high_freq_factor": None}}, "high_freq_factor"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({**LLAMA, "rope_scaling": {**YARN, "mrope_section": [1, 2]}}, "mrope_section"),
        ({**LLAMA, "rope_scaling": [8.0]}, "rope_parameters"),
        ({**LLAMA, "rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({**LLAMA, "rope_theta": "1e4"}, "rope_theta"),
        ({**LLAMA, "rope_theta": 1}, "rope_theta"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"),
        (config_of("smollm3", no_rope_layers=[1]), "no_rope_layers"),
        (config_of("granite", residual_multiplier=0), "residual_multiplier"),
        (config_of("phi3", rope_parameters=YARN), "rope_type"),
        (config_of("phi3-longrope", head_dim=32), "short_factor"),
        (config_of("gemma3", final_logit_softcapping=30.0), "final_logit_softcapping"),
        (config_of("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (config_of("gemma3", hidden_activation="gelu"), "hidden_activation"),
        (config_of("gemma3", rope_parameters=YARN), "rope_parameters"),
        (config_of("ministral3", rope_parameters=YARN), "llama_4_scaling_beta"),
        (config_of("glm4", partial_rotary_factor=1.5), "partial_rotary_factor"),
        (config_of("exaone4", sliding_window=0), "sliding_window"),
        (config_of("cohere2", rotary_pct=0.5), "rotary_pct"),
        (config_of("cohere2", head_dim=24), "head_dim"),
        (config_of("cohere2", use_qk_norm=True), "use_qk_norm"),
        (config_of("qwen3_5", attn_output_gate=False), "attn_output_gate"),
        (config_of("qwen3_5", layer_types=["full_attention"]), "layer_types"),
        (config_of("qwen3_5", layer_types=["sliding_attention"] * 3), "layer_types"),
        (config_of("qwen3_5", layer_types=["linear_attention"] * 3), "layer_types"),
        (config_of("qwen3_5", layer_types=None, full_attention_interval="2"), "layer_types"),
        (config_of("qwen3_5", linear_num_value_heads=3), "linear_num_value_heads"),
        (config_of("qwen3_5", linear_key_head_dim=0), "linear_key_head_dim"),
        (config_of("qwen3_5", quantization_config={"bits": 4}), "quantization_config"),
        (config_of("qwen3_5", num_experts=8), "num_experts"),
        (config_of("qwen3_moe", num_experts_per_tok=7), "num_experts_per_tok"),
        (config_of("qwen3_moe", num_experts=0), "num_experts"),
        (config_of("qwen3_moe", num_local_experts=7), "num_local_experts"),
        (config_of("qwen3_moe", mlp_only_layers=1), "mlp_only_layers"),
        (config_of("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step"),
        (config_of("qwen3_moe", output_router_logits=True), "output_router_logits"),
        (config_of("qwen3_moe", num_shared_experts=8), "num_shared_experts"),
        (config_of("qwen3_moe", quantization_config={"bits": 4}), "quantization_config"),
        (config_of("qwen3_5_moe", norm_topk_prob=False), "norm_topk_prob"),
        (config_of("gpt_oss", quantization_config={"bits": 4}), "quantization_config"),
        (config_of("gemma4", enable_moe_block=True), "enable_moe_block"),
        (config_of("gemma4", attention_bias=True), "attention_bias"),
        (config_of("gemma4", use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (config_of("gemma4", num_kv_shared_layers=3), "num_kv_shared_layers"),
        (config_of("gemma4", layer_types=["chunked_attention"] * 4), "layer_types"),
        (config_of("gemma4", per_layer_config={"1": {"sliding_window": 9}}), "per_layer_config"),
        (config_of("gemma4", global_head_dim=24), "head_dim"),
        (
            config_of("gemma4", per_layer_config={"1": {"num_key_value_heads": 3}}),
            "num_key_value_heads",
        ),
        (config_of("gemma4", rope_parameters=YARN), "rope_parameters"),
        (config_of("gemma4", quantization_config={"bits": 4}), "quantization_config"),
        ({"model_type": "gemma4_unified", "text_config": {}}, "model_type"),
        (config_of("gpt_oss", swiglu_limit=-1.0), "swiglu_limit"),
        (config_of("gpt_oss", experts_per_token=4), "experts_per_token"),
        (config_of("gpt_oss", sliding_window=None), "layer_types"),
        (
            config_of("qwen3_moe", quantization_config={"quant_method": "mxfp4"}),
            "quantization_config",
        ),
        (
            config_of("qwen3_5_moe", shared_expert_intermediate_size=0),
            "shared_expert_intermediate_size",
        ),
        ({"model_type": "gemma3"}, "text_config"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma2"}}, "text_config"),
        ({"model_type": "gemma3", "text_config": {}, "audio_config": {"a": 1}}, "audio_config"),
        (
            {"model_type": "mistral3", "text_config": MISTRAL, "quantization_config": {"bits": 4}},
            "quantization_config",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        ModelConfig.from_fields(fields, None)
    assert raised.value.param == param


def test_every_other_family_of_transformers_is_refused_by_name() -> None:
    others = sorted(set(CONFIG_MAPPING) - set(PLANS) - set(WITH_IMAGES))
    assert len(others) > 300
    for name in others:
        with pytest.raises(UnsupportedModel) as raised:
            ModelConfig.from_fields({**LLAMA, "model_type": name}, None)
        assert raised.value.param == "model_type" and repr(name) in str(raised.value)
        with pytest.raises(ValueError, match="model_type is"):
            BaseShape.from_config({**LLAMA, "model_type": name})


def test_uploads_and_the_engine_know_the_same_families() -> None:
    assert set(PLANS) == set(KNOWN)


def test_qwen3_5_without_layer_types_has_transformers_own() -> None:
    fields = {**COMMON, "num_hidden_layers": 6, "full_attention_interval": 3}
    theirs = AutoConfig.for_model("qwen3_5_text", **fields)
    own = {**fields, "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}
    found = ModelConfig.from_fields(own, None).plan.delta_layers
    assert found == (0, 1, 3, 4) == BaseShape.from_config(own).delta_layers
    kinds = enumerate(theirs.layer_types)
    assert found == tuple(i for i, kind in kinds if kind == "linear_attention")


def test_qwen3_without_a_head_dim_has_transformers_own() -> None:
    fields = {**COMMON, "model_type": "qwen3", "rms_norm_eps": 1e-6}
    theirs = AutoConfig.for_model("qwen3", **COMMON)
    assert ModelConfig.from_fields(fields, None).head_dim == theirs.head_dim == 128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3"])
def test_sharded_checkpoints_of_half_precision(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    base = save_family(tmp_path / "base", name)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    (sharded / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 256], "do_sample": True})
    )
    config = ModelConfig.from_folder(sharded)
    assert config.eos_token_ids == (3, 256)
    weights = load_weights(sharded, config, "cpu", torch.float32)
    assert weights.lm_head.dtype == torch.float32
    engine = Engine(EngineConfig(model_dir=sharded, arena_bytes=4 << 20))
    got = run(engine, request("r", prompt(0, 40), max_tokens=6))["r"].token_ids
    engine.close()
    wide = model.float()
    with torch.no_grad():
        logits = wide(torch.tensor([prompt(0, 40) + got])).logits[0, 39:-1]
    assert got == logits.argmax(-1).tolist()


def test_a_tied_checkpoint_may_carry_its_head(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = save_family(tmp_path, "qwen2")
    tensors = load_file(base / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors")
    weights = load_weights(base, ModelConfig.from_folder(base), "cpu", torch.float32)
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("left_out", [None, "model.embed_tokens.weight"], ids=["both", "head"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["folder", "loaded"])
def test_a_tied_flag_with_another_head_means_what_it_means_to_hugging_face(
    tmp_path: Path, left_out: str | None, is_loaded: bool
) -> None:
    """Both are used where they differ; where one is left out, the other is both."""
    from safetensors.torch import load_file, save_file

    base = save_family(tmp_path, "qwen2")
    tensors = load_file(base / "model.safetensors")
    torch.manual_seed(5)
    tensors["lm_head.weight"] = torch.randn(257, 64) * 0.3
    tensors.pop(left_out or "", None)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    weights = share_model(model).weights if is_loaded else None
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20), weights=weights)
    got = run(engine, request("r", prompt(0, 20), max_tokens=6))["r"].token_ids
    engine.close()
    with torch.no_grad():
        logits = model(torch.tensor([prompt(0, 20) + got])).logits[0, 19:-1]
    assert got == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("llama-biases", "model.layers.1.mlp.down_proj.bias"),
    ],
)
def test_a_missing_or_quantised_tensor_is_named(tmp_path: Path, name: str, tensor: str) -> None:
    from safetensors.torch import load_file, save_file

    base = save_family(tmp_path, name)
    tensors = load_file(base / "model.safetensors")
    config = ModelConfig.from_folder(base)
    for broken in ({**tensors, tensor: tensors[tensor].to(torch.int8)}, dict(tensors)):
        if broken[tensor].dtype != torch.int8:
            del broken[tensor]
        save_file(broken, base / "model.safetensors")
        with pytest.raises(UnsupportedModel) as raised:
            load_weights(base, config, "cpu", torch.float32)
        assert raised.value.param == tensor


def test_experts_are_stacked_in_a_checkpoint_or_apart(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = save_family(tmp_path, "qwen3_moe")
    config, file = ModelConfig.from_folder(base), base / "model.safetensors"
    assert "model.layers.0.mlp.experts.5.gate_proj.weight" in load_file(file)
    apart = load_weights(base, config, "cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, file)
    stacked = load_weights(base, config, "cpu", torch.float32)
    for one, other in zip(apart.layers, stacked.layers, strict=True):
        if one.experts is not None and other.experts is not None:
            assert torch.equal(one.experts.gate_up, other.experts.gate_up)
            assert torch.equal(one.experts.down, other.experts.down)
    assert [layer.experts is None for layer in stacked.layers] == [False, True, False]
    name = "model.layers.2.mlp.experts.down_proj"
    save_file({**tensors, name: tensors[name].transpose(1, 2).contiguous()}, file)
    with pytest.raises(UnsupportedModel) as raised:
        load_weights(base, config, "cpu", torch.float32)
    assert raised.value.param == name


def test_experts_are_not_quantised(tmp_path: Path) -> None:
    base = save_family(tmp_path, "qwen3_moe")
    with pytest.raises(UnsupportedModel, match="has experts, for which base_precision"):
        Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20, base_precision="fp8"))


def test_gpt_oss_may_be_stored_in_mxfp4(tmp_path: Path) -> None:
    """Its experts become the numbers that transformers makes of them, to the bit."""
    from safetensors.torch import load_file, save_file

    base = save_family(tmp_path, "gpt_oss")
    config, file = base / "config.json", base / "model.safetensors"
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, width_in, width_out = tensors.pop(name).shape
        blocks = (num, width_out, width_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 140, blocks, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "quantization_config": stored}))
    weights = load_weights(base, ModelConfig.from_folder(base), "cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for ours, theirs in zip(weights.layers, model.model.layers, strict=True):
        experts = theirs.mlp.experts
        gate_up = experts.gate_up_proj.transpose(1, 2)
        assert ours.experts is not None
        assert torch.equal(ours.experts.gate_up, torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1))
        assert torch.equal(ours.experts.down, experts.down_proj.transpose(1, 2))
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name].float()}, file)
    with pytest.raises(UnsupportedModel) as raised:
        load_weights(base, ModelConfig.from_folder(base), "cpu", torch.float32)
    assert raised.value.param == name


@pytest.mark.parametrize("setting", [{"use_triton": True}, {"base_precision": "fp8"}])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gpt_oss", "attention sinks"),
        ("gemma4", "layers of several shapes"),
    ],
)
def test_what_a_gpu_has_no_kernels_for_is_refused(
    tmp_path: Path, name: str, what: str, setting: dict[str, Any]
) -> None:
    base = save_family(tmp_path, name)
    with pytest.raises(UnsupportedModel, match=f"has {what}, for which"):
        Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20, **setting))


def test_layers_of_several_shapes_are_served_in_fp32_alone(tmp_path: Path) -> None:
    base = save_family(tmp_path, "gemma4")
    settings: list[dict[str, Any]] = [{"kv_precision": "fp8"}, {"dtype": "bfloat16"}]
    for setting in settings:
        with pytest.raises(UnsupportedModel) as raised:
            Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20, **setting))
        assert raised.value.param == next(iter(setting))


def test_gemma4_without_sizes_of_its_layers_has_transformers_own() -> None:
    fields = {**COMMON, "num_hidden_layers": 7, "attention_k_eq_v": True}
    theirs = AutoConfig.for_model("gemma4_text", **fields, num_global_key_value_heads=1)
    own = {**fields, "model_type": "gemma4_text", "rms_norm_eps": 1e-6}
    config = ModelConfig.from_fields({**own, "num_global_key_value_heads": 1}, None)
    for layer, (shape, kind) in enumerate(zip(config.plan.shapes, theirs.layer_types, strict=True)):
        sizes = theirs.per_layer_config[layer]
        assert (shape.head_dim, shape.kv_heads) == (sizes.head_dim, sizes.num_key_value_heads)
        assert shape.is_full == (kind == "full_attention") != shape.has_v


def test_an_unnamed_bias_is_refused(tmp_path: Path) -> None:
    """A Llama whose file has biases that its config does not speak of."""
    base = save_family(tmp_path, "llama-biases")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "mlp_bias": False}))
    with pytest.raises(UnsupportedModel) as raised:
        load_weights(base, ModelConfig.from_folder(base), "cpu", torch.float32)
    assert raised.value.param == "model.layers.0.mlp.down_proj.bias"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saves_is_read(tmp_path: Path, name: str) -> None:
    base = save_family(tmp_path, name)
    config = ModelConfig.from_folder(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert share_model(model).config == config
    found = model.state_dict()
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert (config.plan.per_layer is not None) == (
        "model.per_layer_projection_norm.weight" in found
    )
    assert (config.plan.qk_norm is not None) == (f"{attention}.q_norm.weight" in found)
    assert config.qkv_bias == (f"{attention}.q_proj.bias" in found)
    assert config.o_bias == (f"{attention}.o_proj.bias" in found)
    assert config.mlp_bias == (f"{mlp}.down_proj.bias" in found)
    assert (1 in config.plan.expert_layers) == (f"{mlp}.experts.down_proj" in found)
    assert config.plan.has_sinks == (f"{attention}.sinks" in found)
    assert plan.base_shape(config) == BaseShape.from_config(
        json.loads((base / "config.json").read_text())
    )
