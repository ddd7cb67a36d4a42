"""Gates of attention: q_proj has them behind each head's q."""

from __future__ import annotations

import torch


def split_gates(
    packed: torch.Tensor, num_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """packed [T, (2 H + 2 K) D] -> copies of q, k, v [T, (H + 2 K) D] and of the gates [T, H D]"""
    queries = 2 * num_heads * head_dim
    q, gate = packed[:, :queries].view(len(packed), num_heads, 2, head_dim).unbind(2)
    return torch.cat((q.flatten(1), packed[:, queries:]), 1), gate.flatten(1)


def join_gates(
    qkv: torch.Tensor, gate: torch.Tensor, num_heads: int, head_dim: int
) -> torch.Tensor:
    """Undo `split_gates`."""
    size = num_heads * head_dim
    heads = (each.view(len(qkv), num_heads, head_dim) for each in (qkv[:, :size], gate))
    return torch.cat((torch.stack(tuple(heads), 2).flatten(1), qkv[:, size:]), 1)
