"""Draft heads for the tiny model's adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from contract.adapters.draft_heads import head_names

HIDDEN, RANK, NUM_HEADS = 64, 24, 3
TENSORS = "adapter_model.safetensors"


def with_heads(source: Path, target: Path, heads: dict[str, torch.Tensor]) -> Path:
    """A copy of an adapter that has these tensors, too."""
    shutil.copytree(source, target)
    save_file({**load_file(source / TENSORS), **heads}, target / TENSORS)
    return target


def random_heads(seed: int, num_heads: int = NUM_HEADS) -> dict[str, torch.Tensor]:
    """Heads that guess wrong nearly always: their up has the size of what it is added to."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for down, up in map(head_names, range(num_heads)):
        tensors[down] = torch.randn(RANK, HIDDEN, generator=drawn)
        tensors[up] = torch.randn(HIDDEN, RANK, generator=drawn)
    return tensors
