"""Causal attention over packed rows: no token sees another row's.

On a GPU FlashAttention as torch has it; where that does not take the shape, and on a CPU, each row
on its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from kernels.training.segments import Rows

#: FlashAttention's largest head.
MAX_HEAD_DIM = 256


def takes_flash(q: torch.Tensor) -> bool:
    """Whether FlashAttention takes these heads: half precision, multiples of 8 up to 256."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= MAX_HEAD_DIM


def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output [T, H, D], the log-sum-exp and the state that the backward pass wants."""
    out, log_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, rows.starts, rows.starts, rows.longest, rows.longest, 0.0, True, False,
        scale=scale, window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return out, log_sum, state, unused


def flash_backward(
    dy: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    rows: Rows,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v; `kept`: q, k, v and what `flash_forward` returned."""
    q, k, v, out, log_sum, state, unused = kept
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, out, log_sum, rows.starts, rows.starts, rows.longest, rows.longest, 0.0,
        True, state, unused, scale=scale, window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return dq, dk, dv


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: Rows,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out, *rest = flash_forward(q, k, v, rows, scale, window)
        ctx.save_for_backward(q, k, v, out, *rest)
        ctx.options = (rows, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return (*flash_backward(dy, ctx.saved_tensors, *ctx.options), None, None, None)


def attention_by_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Each row by torch's scaled_dot_product_attention, differentiable by autograd."""
    parts = []
    for start, end in itertools.pairwise(rows.bounds):
        if start == end:
            continue
        own = [x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        mask = None
        if window is not None and window < end - start:
            ones = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(1 - window)
        out = functional.scaled_dot_product_attention(
            own[0], own[1], own[2],
            attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True,
        )  # fmt: skip
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else torch.empty_like(q)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """q [T, H, D], k and v [T, K, D] (views are taken) -> [T, H, D]; K divides H.

    scale   1 / sqrt(D) unless given
    window  tokens that a token sees, itself included; None: all before it in its row
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if takes_flash(q):
        out: torch.Tensor = _FlashAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, rows, scale, window
        )
        return out
    return attention_by_row(q, k, v, rows, scale, window)
