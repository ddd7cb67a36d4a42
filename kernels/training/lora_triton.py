"""A segmented adapter on a GPU: into the rank space, out of it, with either factor.

A program has a block of tokens of one segment. Of the factors it reads the run's own rank rows, in
blocks of 16; modules that the run does not train have rank 0 and cost nothing.

    lora_in    out[t, m R + r] = sum_k x[t, k] A_m[r, k]                 u = x A^T
    lora_out   y[t, n] += scale sum_r u[t, m R + r] B_m[n, r]            y += scale * u B^T
    lora_back  dx[t, k] += sum_m,r du[t, m R + r] A_m[r, k]              dx += du A
"""

from __future__ import annotations

import itertools

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.training.pools import LoraSite
from kernels.training.segments import Segments


@jit()
def load_block(blocks_ptr, index):
    """Segment, first token, number of tokens."""
    record = blocks_ptr + index * 4
    first = tl.load(record + 1).to(tl.int64)
    return tl.load(record), first, tl.load(record + 2), tl.load(record + 3)


@jit()
def find_columns(block, bound0, bound1, bound2, bound3, NUM_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the index and bounds of a block's module, and the block's first column in it."""
    blocks0 = tl.cdiv(bound1 - bound0, BLOCK_N)
    blocks1 = tl.cdiv(bound2 - bound1, BLOCK_N) if NUM_M > 1 else 0
    module = (block >= blocks0).to(tl.int32) if NUM_M > 1 else 0
    if NUM_M > 2:
        module += (block >= blocks0 + blocks1).to(tl.int32)
    low = tl.where(module == 0, bound0, tl.where(module == 1, bound1, bound2))
    high = tl.where(module == 0, bound1, tl.where(module == 1, bound2, bound3))
    before = tl.where(module == 0, 0, tl.where(module == 1, blocks0, blocks0 + blocks1))
    return module, low, high, (block - before) * BLOCK_N


@jit()
def load_factor(offset_ptr, rank_ptr, cell, ALIGNED: tl.constexpr, RANK_STEP: tl.constexpr):
    """Load a factor's offset in the pools, and its rank."""
    offset, rank = tl.load(offset_ptr + cell), tl.load(rank_ptr + cell)
    if ALIGNED:
        offset = tl.multiple_of(offset, 8)
    return offset, tl.multiple_of(rank, RANK_STEP)


@jit("num_runs")
def _in_kernel(
    x_ptr,
    values_ptr,
    a_ptr,
    rank_ptr,
    blocks_ptr,
    out_ptr,
    num_runs,
    width,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(0))
    n = tl.arange(0, BLOCK_R)  # 16 rank rows of each module, one under the other
    module, r = n // 16, tl.program_id(1) * 16 + n % 16
    t = tl.arange(0, BLOCK_T)
    cell = module * num_runs + segment
    rank = tl.load(rank_ptr + cell, mask=module < NUM_M, other=0)
    if tl.max(rank, axis=0) > tl.program_id(1) * 16:
        has = r < rank
        offset = tl.load(a_ptr + cell, mask=has, other=0)
        if ALIGNED:
            offset = tl.multiple_of(offset, 8)
        a_rows = values_ptr + offset + r * width
        x_rows = x_ptr + (first + t) * width
        product = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        for k in range(0, width, BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = (columns < width)[None, :]
            x = tl.load(
                x_rows[:, None] + columns[None, :], mask=(t < count)[:, None] & inside, other=0.0
            )
            a = tl.load(a_rows[:, None] + columns[None, :], mask=has[:, None] & inside, other=0.0)
            product = tl.dot(x, tl.trans(a), product, input_precision="ieee")
        place = (first + t)[:, None] * (NUM_M * R) + (module * R + r)[None, :]
        mask = (t < count)[:, None] & has[None, :]
        tl.store(out_ptr + place, product.to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def out_tile(
    u_ptr,
    u_stride,
    values_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,
    cell,
    rows,
    live,
    n,
    inside,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """scale u B^T of one module, [BLOCK_T, BLOCK_N] in u's type.

    Rounded to it, as PEFT rounds it: that halves what threads exchange to add it to something.
    """
    r = tl.arange(0, 16)
    offset, rank = load_factor(b_ptr, rank_ptr, cell, ALIGNED, RANK_STEP)
    u_ptrs = u_ptr + rows[:, None] * u_stride + r[None, :]
    b_ptrs = values_ptr + offset + n[:, None] * rank + r[None, :]
    has = (r < rank)[None, :]
    u = tl.load(u_ptrs, mask=live[:, None] & has, other=0.0)
    b = tl.load(b_ptrs, mask=inside[:, None] & has, other=0.0)
    product = tl.dot(u, tl.trans(b), input_precision="ieee")
    if R > 16:
        for start in range(16, rank, 16):
            has = ((start + r) < rank)[None, :]
            u = tl.load(u_ptrs + start, mask=live[:, None] & has, other=0.0)
            b = tl.load(b_ptrs + start, mask=inside[:, None] & has, other=0.0)
            product = tl.dot(u, tl.trans(b), product, input_precision="ieee")
    return (product * tl.load(scale_ptr + cell)).to(u.dtype)


@jit("num_runs")
def _out_kernel(
    u_ptr,
    values_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,
    blocks_ptr,
    y_ptr,
    residual_ptr,
    num_runs,
    y_stride,
    bound0,
    bound1,
    bound2,
    bound3,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK_STEP: tl.constexpr,
    ADD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(1))
    module, low, high, column = find_columns(
        tl.program_id(0), bound0, bound1, bound2, bound3, NUM_M, BLOCK_N
    )
    n, t = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    live, inside = (t < count)[:, None], n < high - low
    place = (first + t)[:, None] * y_stride + (low + n)[None, :]
    mask = live & inside[None, :]
    cell = module * num_runs + segment
    # Asked for first, needed last: before it is known whether there is anything to add.
    if ADD:
        y = tl.load(y_ptr + place, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0)
    if tl.load(rank_ptr + cell) > 0 or HAS_RESIDUAL or not ADD:
        product = out_tile(
            u_ptr + module * R, NUM_M * R, values_ptr, b_ptr, rank_ptr, scale_ptr, cell,
            first + t, t < count, n, inside, R, ALIGNED, RANK_STEP, BLOCK_T, BLOCK_N,
        )  # fmt: skip
        if ADD or HAS_RESIDUAL:
            product = product.to(tl.float32)
        if ADD:
            product += y.to(tl.float32)
        if HAS_RESIDUAL:
            product += residual.to(tl.float32)
        tl.store(y_ptr + place, product.to(y_ptr.dtype.element_ty), mask=mask)


@jit("num_runs")
def _back_kernel(
    du_ptr,
    values_ptr,
    a_ptr,
    rank_ptr,
    blocks_ptr,
    dx_ptr,
    num_runs,
    width,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(1))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    module = n // 16
    cell = module * num_runs + segment
    live, inside = (t < count)[:, None], (column < width)[None, :]
    dx_ptrs = dx_ptr + (first + t)[:, None] * width + column[None, :]
    if ADD:
        dx = tl.load(dx_ptrs, mask=live & inside, other=0.0)
    rank = tl.load(rank_ptr + cell, mask=module < NUM_M, other=0)
    offset = tl.load(a_ptr + cell, mask=module < NUM_M, other=0)
    if ALIGNED:
        offset = tl.multiple_of(offset, 8)
    r = n % 16
    du_ptrs = du_ptr + (first + t)[:, None] * (NUM_M * R) + (module * R + r)[None, :]
    a_ptrs = (values_ptr + offset + r * width)[:, None] + column[None, :]
    has = r < rank
    du = tl.load(du_ptrs, mask=live & has[None, :], other=0.0)
    a = tl.load(a_ptrs, mask=has[:, None] & inside, other=0.0)
    product = tl.dot(du, a, input_precision="ieee")
    if R > 16:
        for start in range(16, tl.max(rank, axis=0), 16):
            has = start + r < rank
            du = tl.load(du_ptrs + start, mask=live & has[None, :], other=0.0)
            a = tl.load(a_ptrs + start * width, mask=has[:, None] & inside, other=0.0)
            product = tl.dot(du, a, product, input_precision="ieee")
    total = product.to(du.dtype)
    if ADD:
        total = total.to(tl.float32) + dx.to(tl.float32)
    tl.store(dx_ptrs, total.to(dx_ptr.dtype.element_ty), mask=live & inside)


def padded_bounds(site: LoraSite) -> tuple[int, int, int, int]:
    """Return the bounds of a site's columns, padded with zeros."""
    assert site.num_modules <= 3
    bounds = (*site.bounds, 0, 0, 0)
    return bounds[0], bounds[1], bounds[2], bounds[3]


def column_blocks(site: LoraSite, block: int) -> int:
    """Blocks of output columns, none across two modules."""
    return sum(ceil_div(high - low, block) for low, high in itertools.pairwise(site.bounds))


def fit(block: int, width: int) -> int:
    """Return `block`, or less if `width` needs less: a power of two, at least 16."""
    return min(block, max(16, next_power_of_2(width)))


def rank_rows(site: LoraSite) -> int:
    """16 rank rows of each module, as a power of two."""
    return next_power_of_2(site.num_modules * 16)


def lora_in_triton(
    x: torch.Tensor,
    values: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    *,
    block_t: int = 64,
    block_k: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [T, in] contiguous -> u [T, modules * padded rank]."""
    u = x.new_empty(x.shape[0], site.num_modules * site.padded_rank)
    blocks = segments.blocks(block_t)
    if len(blocks):
        _in_kernel[(len(blocks), site.padded_rank // 16)](
            x_ptr=x, values_ptr=values, a_ptr=site.a, rank_ptr=site.rank, blocks_ptr=blocks,
            out_ptr=u, num_runs=site.rank.shape[1], width=x.shape[1], NUM_M=site.num_modules,
            R=site.padded_rank, ALIGNED=site.aligned and x.shape[1] % 8 == 0,
            BLOCK_R=rank_rows(site), BLOCK_T=block_t, BLOCK_K=fit(block_k, x.shape[1]),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
    return u


def lora_out_triton(
    u: torch.Tensor,
    values: torch.Tensor,
    y: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    *,
    add: bool = True,
    residual: torch.Tensor | None = None,
    block_t: int = 32,
    block_n: int = 128,
    num_warps: int = 4,
    num_stages: int = 1,
) -> None:
    """Add the adapters' output to y [T, out], or with add=False write it there, zeros included.

    residual  like y, added as well
    """
    assert residual is None or residual.stride() == y.stride()
    blocks = segments.blocks(block_t)
    bounds, block_n = padded_bounds(site), fit(block_n, site.bounds[-1])
    if len(blocks):
        _out_kernel[(column_blocks(site, block_n), len(blocks))](
            u_ptr=u, values_ptr=values, b_ptr=site.b, rank_ptr=site.rank, scale_ptr=site.scale,
            blocks_ptr=blocks, y_ptr=y, residual_ptr=y if residual is None else residual,
            num_runs=site.rank.shape[1], y_stride=y.stride(0), HAS_RESIDUAL=residual is not None,
            bound0=bounds[0], bound1=bounds[1], bound2=bounds[2], bound3=bounds[3],
            NUM_M=site.num_modules, R=site.padded_rank, ALIGNED=site.aligned,
            RANK_STEP=site.rank_step, ADD=add, BLOCK_T=block_t, BLOCK_N=block_n,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip


def lora_back_triton(
    du: torch.Tensor,
    values: torch.Tensor,
    dx: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    *,
    add: bool = True,
    block_t: int = 64,
    block_n: int = 128,
    num_warps: int = 4,
    num_stages: int = 1,
) -> None:
    """Add du A to dx [T, in] contiguous, or with add=False write it there, zeros included."""
    blocks, width = segments.blocks(block_t), dx.shape[1]
    block_n = fit(block_n, width)
    if len(blocks):
        _back_kernel[(ceil_div(width, block_n), len(blocks))](
            du_ptr=du, values_ptr=values, a_ptr=site.a, rank_ptr=site.rank, blocks_ptr=blocks,
            dx_ptr=dx, num_runs=site.rank.shape[1], width=width, NUM_M=site.num_modules,
            R=site.padded_rank, ALIGNED=site.aligned and width % 8 == 0, ADD=add,
            BLOCK_R=rank_rows(site), BLOCK_T=block_t, BLOCK_N=block_n,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
