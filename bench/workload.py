"""Seeded prompts and adapters, so that two systems are given the same work."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapter_format import PROJECTION_NAMES
from engine.config import ModelConfig


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random token ids."""
    choose = random.Random(seed)
    return [[choose.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def save_random_adapter(folder: Path, model: ModelConfig, *, rank: int, seed: int) -> Path:
    """A PEFT folder with random A and B of `rank` on all seven linears of every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.num_layers):
        for projection, (in_width, out_width) in enumerate(model.projection_widths):
            block = "self_attn" if projection < 4 else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{PROJECTION_NAMES[projection]}"
            lora_a = torch.randn(rank, in_width, generator=generator) / in_width**0.5
            lora_b = torch.randn(out_width, rank, generator=generator) * 0.02
            tensors[f"{name}.lora_A.weight"] = lora_a
            tensors[f"{name}.lora_B.weight"] = lora_b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTION_NAMES),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
