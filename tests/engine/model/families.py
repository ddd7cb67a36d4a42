"""Tiny random models of every family and way to scale RoPE, and what Hugging Face makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.engine.conftest import save_tokenizer

ORIGINAL = 32  # positions before scaling; prompts are longer
THETA = 100.0  # so that waves of all lengths lie within a few dozen positions

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN_OPTIONS = {
    **YARN,
    "beta_fast": 4,
    "beta_slow": 2,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "truncate": False,
}
MIXED = ["sliding_attention", "full_attention"]
SLIDING = {"use_sliding_window": True, "sliding_window": 9}

# name -> model_type and the fields that differ from COMMON
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {**LINEAR, "rope_theta": THETA}}),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": THETA}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN_OPTIONS, "rope_theta": THETA}}),
    "mistral": ("mistral", {"sliding_window": 17, "head_dim": 24}),
    "mistral-1": ("mistral", {"sliding_window": 1}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": THETA}}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-sliding": (
        "qwen3",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "qwen3-biases": ("qwen3", {"head_dim": 24, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "qwen3-yarn": (
        "qwen3",
        {"head_dim": 32, "rope_parameters": {**YARN, "rope_theta": THETA, "attention_factor": 1.7}},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": False}),
    "smollm3-sliding": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 9},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 21, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 4.0],
                "long_factor": [2.0] * 6,
                "partial_rotary_factor": 0.75,
                "rope_theta": THETA,
            },
            "original_max_position_embeddings": 130,
        },
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "rms_norm_eps": 1e-3}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 13,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": THETA},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    "seed_oss": (
        "seed_oss",
        {
            "head_dim": 24,
            "attention_out_bias": True,
            "mlp_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
        },
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "rope_theta": THETA, "llama_4_scaling_beta": 0.3},
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 11, "layer_types": MIXED}),
    "exaone4-full": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "glm4": ("glm4", {"head_dim": 24, "rms_norm_eps": 1e-4}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 11,
            "layer_types": MIXED,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": THETA},
                "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
            },
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 11, "layer_types": MIXED, "logit_scale": 0.5}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": THETA,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen3_moe-sliding": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
}
FAMILIES["gemma4"] = (
    "gemma4_text",
    {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": [*MIXED, *MIXED],
        "sliding_window": 13,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 257,
        "rms_norm_eps": 1e-3,
    },
)
FAMILIES["gemma4-one"] = (
    "gemma4_text",
    {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", *MIXED],
        "sliding_window": 13,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 257,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": THETA,
                "partial_rotary_factor": 0.3,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
)
FAMILIES["gpt_oss"] = (
    "gpt_oss",
    {
        "head_dim": 24,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", *MIXED],
        "sliding_window": 13,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.7,
        "swiglu_alpha": 1.3,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {**YARN, "truncate": False, "rope_theta": THETA},
    },
)
FAMILIES["qwen3_5_moe"] = (
    "qwen3_5_moe_text",
    {
        **FAMILIES["qwen3_5"][1],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
    },
)
CPU_ALONE = ("gpt_oss", "gemma4")
#: Those that a GPU serves, too.
ON_A_GPU = [name for name in FAMILIES if not name.startswith(CPU_ALONE)]
#: Those of them whose linears may be quantised.
IN_FP8 = [name for name in ON_A_GPU if not name.startswith(("qwen3_5", "qwen3_moe"))]
#: Of a model that sees images.
WITH_IMAGES = {
    "gemma3": ("gemma3-images", {"mm_tokens_per_image": 4, "image_token_index": 250}),
    "mistral3": ("mistral", {"image_token_index": 250}),
    "qwen3_5": ("qwen3_5", {"image_token_id": 250, "video_token_id": 251}),
    "qwen3_5_moe": ("qwen3_5_moe", {"image_token_id": 250, "video_token_id": 251}),
    "gemma4": ("gemma4", {"image_token_id": 250, "video_token_id": 251, "audio_token_id": 252}),
}
_VISION_TYPES = {
    "gemma3": "siglip_vision_model", "mistral3": "pixtral", "qwen3_5": "qwen3_5_vision",
    "qwen3_5_moe": "qwen3_5_moe_vision", "gemma4": "gemma4_vision",
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
}  # fmt: skip
#: Families whose modules have these names in the place of Llama's.
FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "glm4": {"gate_up_proj": ("gate_proj", "up_proj")},
}
#: Further modules of a family, which take adapters where these of Llama's do.
_OF_DELTA = {
    "k_proj": ("in_proj_qkv", "in_proj_a"),
    "o_proj": ("out_proj", "in_proj_z", "in_proj_b"),
}
BESIDE = {"qwen3_5_text": _OF_DELTA, "qwen3_5_moe_text": _OF_DELTA}
#: Families of which adapters change attention alone.
WITH_EXPERTS = ("qwen3_moe", "gpt_oss")
COMMON = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}


def targets(base: Path, linears: list[str]) -> list[str]:
    """The modules of a base that are these of Llama's."""
    model_type = json.loads((base / "config.json").read_text())["model_type"]
    if model_type in WITH_EXPERTS:
        linears = [each for each in linears if each not in ("gate_proj", "up_proj", "down_proj")]
    fused, beside = FUSED.get(model_type, {}), BESIDE.get(model_type, {})
    names = {part: module for module, parts in fused.items() for part in parts}
    found = (module for linear in linears for module in (linear, *beside.get(linear, ())))
    return list(dict.fromkeys(names.get(module, module) for module in found))


def save_with_images(folder: Path, name: str) -> Path:
    """A model folder of WITH_IMAGES, whose text model is random as in `save_family`."""
    text, fields = WITH_IMAGES[name]
    model_type, own = FAMILIES[text.removesuffix("-images")]
    vision = {"model_type": _VISION_TYPES[name], **VISION}
    inner = {**COMMON, "model_type": model_type, **own}
    return _save(folder, name, {**fields, "text_config": inner, "vision_config": vision})


def save_family(folder: Path, name: str, **changes: Any) -> Path:
    """A model folder of FAMILIES whose every parameter is random, biases and norms as well."""
    model_type, fields = FAMILIES[name]
    torch.manual_seed(len(name))
    return _save(folder, model_type, {**COMMON, **fields, **changes})


def _save(folder: Path, model_type: str, fields: dict[str, Any]) -> Path:
    config = AutoConfig.for_model(model_type, **fields)
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = 0.5 + torch.rand_like(parameter)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("layer_scalar"):
            buffer.fill_(0.5 + torch.rand(()).item())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("A_log"):  # states last long, so that it shows what they hold
            parameter.data = -3 * torch.rand_like(parameter)
        elif parameter_name.endswith("bias"):
            parameter.data = torch.randn_like(parameter) * 0.5
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
