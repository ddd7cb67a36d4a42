"""A segmented adapter by torch alone, run after run and module after module; see lora_triton.py.

What lies between A and B is `[T, modules * padded rank]`; columns from a run's own rank on, and
those of a module that it does not train, are undefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.training.pools import LoraSite
from kernels.training.segments import Segments


@dataclass(frozen=True, slots=True)
class _Cell:
    """One module of one run: its tokens, its columns of y and of u, where its factors begin."""

    tokens: slice
    columns: slice
    inner: slice
    a: int
    b: int
    rank: int
    scale: float

    def factor_a(self, pool: torch.Tensor, width: int) -> torch.Tensor:
        """Return A [rank, in], a view of the pool."""
        return pool[self.a : self.a + self.rank * width].view(self.rank, width)

    def factor_b(self, pool: torch.Tensor) -> torch.Tensor:
        """Return B [columns, rank], a view of the pool."""
        columns = self.columns.stop - self.columns.start
        return pool[self.b : self.b + self.rank * columns].view(columns, self.rank)


def _cells(site: LoraSite, segments: Segments) -> Iterator[_Cell]:
    """Every module that a run with tokens trains."""
    a, b, rank, scale = (t.tolist() for t in (site.a, site.b, site.rank, site.scale))
    for m, (low, high) in enumerate(itertools.pairwise(site.bounds)):
        inner = m * site.padded_rank
        for run, (start, end) in enumerate(itertools.pairwise(segments.bounds)):
            own = rank[m][run]
            if own == 0 or start == end:
                continue
            yield _Cell(
                tokens=slice(start, end), columns=slice(low, high),
                inner=slice(inner, inner + own), a=a[m][run], b=b[m][run], rank=own,
                scale=scale[m][run],
            )  # fmt: skip


def _add_product(
    out: torch.Tensor, inner: torch.Tensor, factor: torch.Tensor, scale: float = 1.0
) -> None:
    """out += scale * inner @ factor, in place; the sum is over a rank.

    On a CPU with AMX the product of bfloat16 (oneDNN 3.12, its issue 5717) reads past a row's end
    if the sum is over an odd number, or over more than 32 and not a multiple of 32, and multiplies
    what it reads by zero. Behind `inner` lies what is undefined, which may be NaN.
    """
    rank = len(factor)
    if out.dtype == torch.bfloat16 and (rank % 32 if rank > 32 else rank % 2):
        out.add_(inner.float() @ factor.float(), alpha=scale)
    else:
        out.addmm_(inner, factor, alpha=scale)


def lora_in_torch(
    x: torch.Tensor, values: torch.Tensor, site: LoraSite, segments: Segments
) -> torch.Tensor:
    """x [T, in] -> u = x A^T."""
    u = x.new_empty(x.shape[0], site.num_modules * site.padded_rank)
    for cell in _cells(site, segments):
        a = cell.factor_a(values, x.shape[1]).to(x.dtype)
        u[cell.tokens, cell.inner] = x[cell.tokens] @ a.T
    return u


def lora_out_torch(
    u: torch.Tensor, values: torch.Tensor, y: torch.Tensor, site: LoraSite, segments: Segments
) -> None:
    """y [T, out] += scale * u B^T, in place."""
    for cell in _cells(site, segments):
        b = cell.factor_b(values).to(u.dtype)
        own = y[cell.tokens, cell.columns]
        _add_product(own, u[cell.tokens, cell.inner], b.T, cell.scale)


def lora_down_torch(
    dy: torch.Tensor, values: torch.Tensor, site: LoraSite, segments: Segments
) -> torch.Tensor:
    """dy [T, out] -> du = scale * dy B."""
    du = dy.new_empty(dy.shape[0], site.num_modules * site.padded_rank)
    for cell in _cells(site, segments):
        b = cell.factor_b(values).to(dy.dtype)
        du[cell.tokens, cell.inner] = (dy[cell.tokens, cell.columns] @ b) * cell.scale
    return du


def lora_back_torch(
    du: torch.Tensor, values: torch.Tensor, dx: torch.Tensor, site: LoraSite, segments: Segments
) -> None:
    """dx [T, in] += du A, in place."""
    for cell in _cells(site, segments):
        a = cell.factor_a(values, dx.shape[1]).to(dx.dtype)
        _add_product(dx[cell.tokens], du[cell.tokens, cell.inner], a)


def add_a_gradient_torch(
    du: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor, site: LoraSite, segments: Segments
) -> None:
    """Add du^T x to the gradient of A."""
    for cell in _cells(site, segments):
        own = cell.factor_a(gradient, x.shape[1])
        own += du[cell.tokens, cell.inner].T @ x[cell.tokens]


def add_b_gradient_torch(
    u: torch.Tensor, dy: torch.Tensor, gradient: torch.Tensor, site: LoraSite, segments: Segments
) -> None:
    """Add scale * dy^T u to the gradient of B."""
    for cell in _cells(site, segments):
        product = dy[cell.tokens, cell.columns].T @ u[cell.tokens, cell.inner]
        cell.factor_b(gradient).add_(product, alpha=cell.scale)
