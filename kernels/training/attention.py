"""Causal attention over packed rows: no token sees another row's.

On a GPU our own kernels, or FlashAttention as torch has it; where neither takes the shape, and on a
CPU, each row on its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention import attend
from kernels.training.attention_triton import (
    attention_backward_triton,
    attention_forward_triton,
    takes_triton,
)
from kernels.training.segments import Rows


def takes_flash(q: torch.Tensor) -> bool:
    """Return whether FlashAttention takes these heads: half precision, multiples of 8 to 256."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


@dataclass(frozen=True, slots=True)
class Options:
    """The range of attention: packed rows, the scores' scale, the window (None: the row), sinks."""

    rows: Rows
    scale: float
    window: int | None
    sinks: torch.Tensor | None = None

    @property
    def flash_window(self) -> dict[str, int | None]:
        """As FlashAttention counts it: tokens before the own one."""
        if self.window is None:
            return {"window_size_left": None, "window_size_right": None}
        return {"window_size_left": self.window - 1, "window_size_right": 0}


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, ...]:
    """Return the output [T, H, D], then the other values that the backward pass needs."""
    starts, longest = options.rows.starts, options.rows.longest
    out, log_sum, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False,
        scale=options.scale, **options.flash_window,
    )  # fmt: skip
    return out, log_sum, state, unused


def flash_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: tuple[torch.Tensor, ...],
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v; `kept` is the result of `flash_forward`."""
    out, log_sum, state, unused = kept
    starts, longest = options.rows.starts, options.rows.longest
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, out, log_sum, starts, starts, longest, longest, 0.0, True, state, unused,
        scale=options.scale, **options.flash_window,
    )  # fmt: skip
    return dq, dk, dv


def attention_by_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """Each row by torch's scaled_dot_product_attention, differentiable by autograd."""
    parts, window, sinks = [], options.window, options.sinks
    sinks = None if sinks is None else sinks[:, None, None]
    for start, end in itertools.pairwise(options.rows.bounds):
        if start == end:
            continue
        own = [x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        mask = None
        if window is not None and window < end - start:
            ones = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(1 - window)
        out = attend(own[0], own[1], own[2], mask, options.scale, sinks, is_grouped=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else torch.empty_like(q)


#: One tensor each for q, k and v.
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attended:
    """An attention's output [T, H, D], and what is kept for its backward pass."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> None:
        self._options = options
        self._inputs: Three = (q, k, v)
        self._kept: tuple[torch.Tensor, ...]
        if takes_triton(q):
            rows, scale, window = options.rows, options.scale, options.window
            self._kept = attention_forward_triton(q, k, v, rows, scale, window)
        elif takes_flash(q):
            self._kept = flash_forward(q, k, v, options)
        else:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            self._inputs = (q, k, v)
            with torch.enable_grad():
                self._kept = (attention_by_row(q, k, v, options),)
        self.out: torch.Tensor = self._kept[0].detach()

    def backward(self, dy: torch.Tensor, gradients: Three) -> None:
        """Write the gradients of q, k, v; dy [T, H, D] contiguous."""
        options, (q, k, v), found = self._options, self._inputs, gradients
        if takes_triton(self.out):
            out, lse = self._kept
            rows, scale, window = options.rows, options.scale, options.window
            attention_backward_triton(dy, q, k, v, out, lse, gradients, rows, scale, window)
            return
        if takes_flash(self.out):
            found = flash_backward(dy, q, k, v, self._kept, options)
        else:
            dq, dk, dv = torch.autograd.grad(self._kept, self._inputs, dy)
            found = dq, dk, dv
        for gradient, own in zip(gradients, found, strict=True):
            gradient.copy_(own)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
    ) -> torch.Tensor:
        q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
        ctx.attended = Attended(q, k, v, options)
        ctx.shapes = [x.shape for x in (q, k, v)]
        out: torch.Tensor = ctx.attended.out.detach()  # not the object that ctx holds
        return out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        dq, dk, dv = (dy.new_empty(shape) for shape in ctx.shapes)
        ctx.attended.backward(dy.contiguous(), (dq, dk, dv))
        ctx.attended = None
        return dq, dk, dv, None


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
    options = Options(rows, scale, window)
    if q.is_cuda:
        out: torch.Tensor = _Attention.apply(q, k, v, options)  # type: ignore[no-untyped-call]
        return out
    return attention_by_row(q, k, v, options)
