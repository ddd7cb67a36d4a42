"""Bounds and defaults of adapter_config.json that hold at upload and in the engine."""

from __future__ import annotations

MAX_RANK = 256
#: Keys of rank_pattern, and of alpha_pattern.
MAX_PATTERNS = 2048
#: What PEFT's LoraConfig has for an adapter_config.json that leaves them out.
DEFAULT_RANK = 8
DEFAULT_ALPHA = 8

BIAS_MODES = ("none", "all", "lora_only")

#: How adapter_model.bin becomes a file that runs no code when it is read.
CONVERT_BIN = (
    "convert it where you trust it: import torch, safetensors.torch as st; "
    'st.save_file({k: v.clone().contiguous() for k, v in torch.load("adapter_model.bin", '
    'map_location="cpu", weights_only=True).items()}, "adapter_model.safetensors")'
)
