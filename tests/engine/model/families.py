"""Tiny random models of every family and way to scale RoPE, and what Hugging Face makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
}
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


def save_family(folder: Path, name: str, **changes: Any) -> Path:
    """A model folder of FAMILIES whose every parameter is random, biases and norms as well."""
    model_type, fields = FAMILIES[name]
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(model_type, **{**COMMON, **fields, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = 0.5 + torch.rand_like(parameter)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data = torch.randn_like(parameter) * 0.5
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
