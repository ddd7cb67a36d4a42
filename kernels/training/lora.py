"""A frozen linear layer with every run's own adapter beside it, and its gradients.

Forward   u = x A^T by segment;  y = x W^T + bias + scale * u B^T
Backward  du = scale * dy B;  dx = dy W + du A;  dA += du^T x;  dB += scale * dy^T u

Of a module that a run does not train nothing is read and nothing written.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional

from kernels.backend import use_triton
from kernels.training.lora_both import lora_backward_b_triton
from kernels.training.lora_gradient import add_a_gradient_triton
from kernels.training.lora_torch import (
    add_a_gradient_torch,
    add_b_gradient_torch,
    lora_back_torch,
    lora_down_torch,
    lora_in_torch,
    lora_out_torch,
)
from kernels.training.lora_triton import (
    lora_back_triton,
    lora_in_triton,
    lora_out_triton,
)
from kernels.training.pools import LoraSite, Pools
from kernels.training.segments import Segments


class Before(Protocol):
    """A function of a layer's input before the product; the backward pass computes it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor: ...


def lora_forward(
    x: torch.Tensor,
    y: torch.Tensor,
    values: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Add the adapters' output, and residual, to y [T, out] in place; x [T, in] -> u, if any."""
    u = lora_shrink(x, values, site, segments)
    if u is not None and use_triton(x):
        lora_out_triton(u, values, y, site, segments, residual=residual)
        return u
    if u is not None:
        lora_out_torch(u, values, y, site, segments)
    if residual is not None:
        y.add_(residual)
    return u


def lora_shrink(
    x: torch.Tensor, values: torch.Tensor, site: LoraSite, segments: Segments
) -> torch.Tensor | None:
    """x [T, in] -> u = x A^T; None: there are no adapters."""
    which = lora_in_triton if use_triton(x) else lora_in_torch
    return which(x, values, site, segments) if site.max_rank else None


def lora_backward_b(
    u: torch.Tensor | None,
    dy: torch.Tensor,
    pools: Pools,
    site: LoraSite,
    segments: Segments,
) -> torch.Tensor | None:
    """Add to the gradients of B; dy [T, out] -> du."""
    if u is None:
        return None
    if use_triton(dy):
        return lora_backward_b_triton(u, dy, pools.values, pools.gradient, site, segments)
    add_b_gradient_torch(u, dy, pools.gradient, site, segments)
    return lora_down_torch(dy, pools.values, site, segments)


def lora_backward_a(
    du: torch.Tensor | None,
    x: torch.Tensor,
    dx: torch.Tensor | None,
    pools: Pools,
    site: LoraSite,
    segments: Segments,
) -> None:
    """Add to the gradients of A, and du A to dx [T, in] in place, unless that is None."""
    if du is None:
        return
    if use_triton(x):
        add_a_gradient_triton(du, x, pools.gradient, site, segments)
        if dx is not None:
            lora_back_triton(du, pools.values, dx, site, segments)
        return
    add_a_gradient_torch(du, x, pools.gradient, site, segments)
    if dx is not None:
        lora_back_torch(du, pools.values, dx, site, segments)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: LoraSite,
        pools: Pools,
        segments: Segments,
        before: Before | None,
    ) -> torch.Tensor:
        inner = (x if before is None else before.forward(x)).contiguous()
        y = functional.linear(inner, weight, bias)
        u = lora_forward(inner, y, pools.values, site, segments, residual)
        ctx.save_for_backward(x, u)
        ctx.weight, ctx.site, ctx.pools = weight, site, pools
        ctx.segments, ctx.before = segments, before
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, u = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dy @ ctx.weight if ctx.needs_input_grad[0] else None
        if u is not None:
            inner = (x if ctx.before is None else ctx.before.forward(x)).contiguous()
            du = lora_backward_b(u, dy, ctx.pools, ctx.site, ctx.segments)
            lora_backward_a(du, inner, dx, ctx.pools, ctx.site, ctx.segments)
        if dx is not None and ctx.before is not None:
            dx = ctx.before.backward(x, dx)
        d_residual = dy if ctx.needs_input_grad[1] else None
        return dx, d_residual, None, None, None, None, None, None


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: LoraSite,
    pools: Pools,
    segments: Segments,
    *,
    before: Before | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, in], weight [out, in] -> y [T, out] = residual + x W^T + bias + each run's adapter's.

    Differentiable in x and residual; at least one must require its gradient: while that is
    computed, the gradients of A and B are added to `pools.gradient`. Keeps x and u.

    before    computed of x first (Norm, SiluMul), and again in the backward pass; x is its input
    residual  [T, out]
    """
    out: torch.Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, site, pools, segments, before
    )
    return out
