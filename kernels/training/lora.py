"""A frozen linear layer with every run's own adapter beside it, and its gradients.

Forward   u = x A^T by segment;  y = x W^T + bias + scale * u B^T
Backward  du = scale * dy B;  dx = dy W + du A;  dA += du^T x;  dB += scale * dy^T u

Of a module that a run does not train nothing is read and nothing written. What lies between A and
B is `[T, modules * padded rank]` in x's type; columns from a run's own rank on are undefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from kernels.backend import use_triton
from kernels.training.lora_gradient import add_a_gradient, add_b_gradient
from kernels.training.lora_triton import (
    lora_back_triton,
    lora_down_triton,
    lora_in_triton,
    lora_out_triton,
)
from kernels.training.pools import LoraSite, Pools
from kernels.training.segments import Segments


class Before(Protocol):
    """What a layer computes of its input before the product, again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One module of one run: its tokens, its columns of y and of u, its factors."""

    tokens: slice
    columns: slice
    inner: slice
    a: slice
    b: slice
    rank: int
    scale: float


def cells(site: LoraSite, segments: Segments) -> Iterator[Cell]:
    """Every module that a run with tokens trains."""
    a, b, rank, scale = (t.tolist() for t in (site.a, site.b, site.rank, site.scale))
    for m, (low, high) in enumerate(itertools.pairwise(site.bounds)):
        for run, (start, end) in enumerate(itertools.pairwise(segments.bounds)):
            own, inner = rank[m][run], m * site.padded_rank
            if own == 0 or start == end:
                continue
            yield Cell(
                tokens=slice(start, end),
                columns=slice(low, high),
                inner=slice(inner, inner + own),
                a=slice(a[m][run], None),
                b=slice(b[m][run], b[m][run] + own * (high - low)),
                rank=own,
                scale=scale[m][run],
            )


def _factors(pool: torch.Tensor, cell: Cell, in_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [columns, rank], views of a pool."""
    start = cell.a.start
    a = pool[start : start + cell.rank * in_width].view(cell.rank, in_width)
    return a, pool[cell.b].view(-1, cell.rank)


def lora_forward_torch(
    x: torch.Tensor, y: torch.Tensor, values: torch.Tensor, site: LoraSite, segments: Segments
) -> torch.Tensor:
    """Add the adapters' output to y [T, out] in place; x [T, in] -> u."""
    u = x.new_empty(x.shape[0], site.num_modules * site.padded_rank)
    for cell in cells(site, segments):
        a, b = _factors(values, cell, x.shape[1])
        own = x[cell.tokens] @ a.to(x.dtype).T
        u[cell.tokens, cell.inner] = own
        y[cell.tokens, cell.columns].addmm_(own, b.to(x.dtype).T, alpha=cell.scale)
    return u


def lora_backward_torch(
    x: torch.Tensor,
    u: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor | None,
    pools: Pools,
    site: LoraSite,
    segments: Segments,
) -> None:
    """Add to dx [T, in] in place, unless it is None, and to the gradients of A and B."""
    for cell in cells(site, segments):
        a, b = _factors(pools.values, cell, x.shape[1])
        da, db = _factors(pools.gradient, cell, x.shape[1])
        own_dy, own_u = dy[cell.tokens, cell.columns], u[cell.tokens, cell.inner]
        du = (own_dy @ b.to(dy.dtype)) * cell.scale
        db += (own_dy.T @ own_u) * cell.scale
        da += du.T @ x[cell.tokens]
        if dx is not None:
            dx[cell.tokens].addmm_(du, a.to(dy.dtype))


def lora_forward_triton(
    x: torch.Tensor, y: torch.Tensor, values: torch.Tensor, site: LoraSite, segments: Segments
) -> torch.Tensor:
    """As `lora_forward_torch`; x contiguous."""
    u = lora_in_triton(x, values, site, segments)
    lora_out_triton(u, values, y, site, segments)
    return u


def lora_backward_triton(
    x: torch.Tensor,
    u: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor | None,
    pools: Pools,
    site: LoraSite,
    segments: Segments,
) -> None:
    """As `lora_backward_torch`; all contiguous."""
    du = lora_down_triton(dy, pools.values, site, segments)
    add_b_gradient(u, dy, pools.gradient, site, segments)
    add_a_gradient(du, x, pools.gradient, site, segments)
    if dx is not None:
        lora_back_triton(du, pools.values, dx, site, segments)


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
        inner = x if before is None else before.forward(x)
        if residual is None:
            y = functional.linear(inner, weight, bias)
        else:
            y = torch.addmm(residual, inner, weight.T)
            y = y if bias is None else y.add_(bias)
        u = None
        if site.max_rank:
            forward = lora_forward_triton if use_triton(x) else lora_forward_torch
            u = forward(inner.contiguous(), y, pools.values, site, segments)
        ctx.save_for_backward(x, u)
        ctx.weight, ctx.site, ctx.pools = weight, site, pools
        ctx.segments, ctx.before = segments, before
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, u = ctx.saved_tensors
        dy = dy.contiguous()
        wants_dx = ctx.needs_input_grad[0]
        dx = dy @ ctx.weight if wants_dx else None
        if u is not None:
            inner = x if ctx.before is None else ctx.before.forward(x)
            backward = lora_backward_triton if use_triton(x) else lora_backward_torch
            backward(inner.contiguous(), u, dy, dx, ctx.pools, ctx.site, ctx.segments)
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

    Differentiable in x and residual, one of which must ask for its gradient: while it is computed,
    the gradients of A and B are added to `pools.gradient`. Keeps x and u.

    before    computed of x first (Norm, SiluMul), and again in the backward pass; x is its input
    residual  [T, out]
    """
    out: torch.Tensor = _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, site, pools, segments, before
    )
    return out
