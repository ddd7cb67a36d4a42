"""Rotary position embedding of q and k, and the write of k and v into their pages."""

from __future__ import annotations

import torch

from kernels.kv_pages import PageLayout


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rope_kv_write_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v to their slots, return the rotated q.

    q          [T, H, D]
    k, v       [T, K, D]
    cos, sin   [M, D] fp32   tables by position, the first half repeated (Hugging Face's form)
    positions  [T]
    arena      [P, page_elems], written
    slots      [T] int64     page * B + offset of each token
    -> [T, H, D]
    """
    token_cos = cos[positions].unsqueeze(1).to(q.dtype)
    token_sin = sin[positions].unsqueeze(1).to(q.dtype)
    pages = arena.view(
        -1, layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim
    )[:, layer]  # [P, 2, K, B, D]
    page, offset = slots // layout.page_size, slots % layout.page_size
    pages[page, 0, :, offset] = _rotate(k, token_cos, token_sin).to(arena.dtype)
    pages[page, 1, :, offset] = v.to(arena.dtype)
    return _rotate(q, token_cos, token_sin)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v to their slots, return the rotated q.

    Shapes as in `rope_kv_write_ref`.
    """
    return rope_kv_write_ref(q, k, v, cos, sin, positions, arena, layout, layer, slots)
