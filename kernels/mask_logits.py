"""Constrained decoding: forbid the tokens whose bit is not set."""

from __future__ import annotations

import torch


def apply_bitmask_ref(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits to -inf where a row's bit is 0; rows that are not listed keep their values.

    logits   [S, V], changed in place
    bitmask  [S, ceil(V / 32)] int32; bit j of word w allows token 32 * w + j
    rows     [N] int64, the rows of both to apply
    """
    if not rows.numel():
        return
    words = bitmask[rows].unsqueeze(-1)
    bits = (words >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits to -inf where a row's bit is 0; shapes as in `apply_bitmask_ref`."""
    apply_bitmask_ref(logits, bitmask, rows)
