"""The gradients of the runs' A and B on a GPU, in an order that does not depend on others' runs.

    dA_m[r, k] += sum_t du[t, m R + r] x[t, k]
    dB_m[n, r] += scale sum_t dy[t, n] u[t, m R + r]

A program has a block of a factor's columns and one chunk of a run's tokens, which it adds up one
after the other. Where a run has several chunks, each writes its sum to a slot of its own, and
another launch adds them to the gradient, the first chunk first.
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, tl
from kernels.training.lora_triton import (
    column_blocks,
    find_columns,
    fit,
    load_block,
    padded_bounds,
    rank_rows,
)
from kernels.training.pools import LoraSite
from kernels.training.segments import Chunks, Segments


@jit("num_runs")
def _a_kernel(
    du_ptr,
    x_ptr,
    gradient_ptr,
    slots_ptr,
    a_ptr,
    rank_ptr,
    chunks_ptr,
    num_runs,
    width,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, slot = load_block(chunks_ptr, tl.program_id(1))
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.arange(0, BLOCK_R)
    module, r = n // 16, tl.program_id(2) * 16 + n % 16
    cell = module * num_runs + segment
    rank = tl.load(rank_ptr + cell, mask=module < NUM_M, other=0)
    if tl.max(rank, axis=0) > tl.program_id(2) * 16:
        has, inside = r < rank, (column < width)[None, :]
        product = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
        for start in range(0, count, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            live = (t < count)[:, None]
            du = tl.load(
                du_ptr + (first + t)[:, None] * (NUM_M * R) + (module * R + r)[None, :],
                mask=live & has[None, :],
                other=0.0,
            )
            x = tl.load(
                x_ptr + (first + t)[:, None] * width + column[None, :],
                mask=live & inside,
                other=0.0,
            )
            product = tl.dot(tl.trans(du), x, product, input_precision="ieee")
        mask = has[:, None] & inside
        if slot < 0:
            offset = tl.load(a_ptr + cell, mask=has, other=0)
            places = (gradient_ptr + offset + r * width)[:, None] + column[None, :]
            tl.store(places, tl.load(places, mask=mask, other=0.0) + product, mask=mask)
        else:
            row = slot.to(tl.int64) * (NUM_M * R) + module * R + r
            places = (slots_ptr + row * width)[:, None] + column[None, :]
            tl.store(places, product, mask=mask)


@jit("num_runs")
def _merge_a_kernel(
    gradient_ptr,
    slots_ptr,
    a_ptr,
    rank_ptr,
    merges_ptr,
    num_runs,
    width,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first_slot, count, _ = load_block(merges_ptr, tl.program_id(1))
    module, r = tl.program_id(2) // R, tl.program_id(2) % R
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cell = module * num_runs + segment
    mask = (column < width) & (r < tl.load(rank_ptr + cell))
    places = gradient_ptr + tl.load(a_ptr + cell) + r * width + column
    total = tl.load(places, mask=mask, other=0.0)
    for slot in range(0, count):
        row = (first_slot + slot) * (NUM_M * R) + module * R + r
        total += tl.load(slots_ptr + row * width + column, mask=mask, other=0.0)
    tl.store(places, total, mask=mask)


@jit("num_runs")
def _merge_b_kernel(
    gradient_ptr,
    slots_ptr,
    b_ptr,
    rank_ptr,
    merges_ptr,
    num_runs,
    out_width,
    bound0,
    bound1,
    bound2,
    bound3,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first_slot, count, _ = load_block(merges_ptr, tl.program_id(1))
    module, low, high, column = find_columns(
        tl.program_id(0), bound0, bound1, bound2, bound3, NUM_M, BLOCK_N
    )
    n, r = column + tl.arange(0, BLOCK_N), tl.program_id(2) * 16 + tl.arange(0, 16)
    cell = module * num_runs + segment
    rank = tl.load(rank_ptr + cell)
    mask = (n < high - low)[:, None] & (r < rank)[None, :]
    places = gradient_ptr + tl.load(b_ptr + cell) + n[:, None] * rank + r[None, :]
    total = tl.load(places, mask=mask, other=0.0)
    for slot in range(0, count):
        row = (first_slot + slot) * out_width + low + n
        total += tl.load(slots_ptr + row[:, None] * R + r[None, :], mask=mask, other=0.0)
    tl.store(places, total, mask=mask)


def add_a_gradient_triton(
    du: torch.Tensor,
    x: torch.Tensor,
    gradient: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    *,
    block_t: int = 64,
    block_n: int = 128,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Add du^T x to the gradients of A; du [T, modules * padded rank], x [T, in] contiguous."""
    chunks, width = segments.chunks(), x.shape[1]
    if not len(chunks.table):
        return
    block_n, inner = fit(block_n, width), site.num_modules * site.padded_rank
    slots = gradient.new_empty(chunks.slots, inner, width)
    common = {
        "gradient_ptr": gradient, "slots_ptr": slots, "a_ptr": site.a, "rank_ptr": site.rank,
        "num_runs": site.rank.shape[1], "width": width, "NUM_M": site.num_modules,
        "R": site.padded_rank,
    }  # fmt: skip
    _a_kernel[(ceil_div(width, block_n), len(chunks.table), site.padded_rank // 16)](
        du_ptr=du, x_ptr=x, chunks_ptr=chunks.table, BLOCK_R=rank_rows(site), BLOCK_T=block_t,
        BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages, **common,
    )  # fmt: skip
    if len(chunks.merges):
        wide = fit(1024, width)
        _merge_a_kernel[(ceil_div(width, wide), len(chunks.merges), inner)](
            merges_ptr=chunks.merges, BLOCK_N=wide, num_warps=4, **common
        )


def merge_b(gradient: torch.Tensor, slots: torch.Tensor, site: LoraSite, chunks: Chunks) -> None:
    """Add the slots [slots, out, padded rank] of runs with several chunks to the gradients of B."""
    if not len(chunks.merges):
        return
    block_n, bounds = fit(128, site.bounds[-1]), padded_bounds(site)
    _merge_b_kernel[
        (column_blocks(site, block_n), len(chunks.merges), site.padded_rank // 16)
    ](
        gradient_ptr=gradient, slots_ptr=slots, b_ptr=site.b, rank_ptr=site.rank,
        merges_ptr=chunks.merges, num_runs=site.rank.shape[1], out_width=site.bounds[-1],
        bound0=bounds[0], bound1=bounds[1], bound2=bounds[2], bound3=bounds[3],
        NUM_M=site.num_modules, R=site.padded_rank, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
