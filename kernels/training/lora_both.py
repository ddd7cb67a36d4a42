"""The gradient of B and du = scale * dy B on a GPU, from one pass over dy.

A program has some columns of dy and one chunk of a run's tokens. Of the sum over all columns that a
du is, it has a part, which a second launch adds up, the first columns' part first.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, tl
from kernels.training.lora_gradient import merge_b
from kernels.training.lora_triton import (
    column_blocks,
    find_columns,
    fit,
    load_block,
    load_factor,
    padded_bounds,
)
from kernels.training.pools import LoraSite
from kernels.training.segments import Segments


@jit("num_runs", "num_tokens")
def _both_kernel(
    u_ptr,
    dy_ptr,
    values_ptr,
    gradient_ptr,
    slots_ptr,
    parts_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,
    chunks_ptr,
    num_runs,
    num_tokens,
    dy_stride,
    out_width,
    bound0,
    bound1,
    bound2,
    bound3,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, slot = load_block(chunks_ptr, tl.program_id(1))
    module, low, high, column = find_columns(
        tl.program_id(0), bound0, bound1, bound2, bound3, NUM_M, BLOCK_N
    )
    n, r = column + tl.arange(0, BLOCK_N), tl.program_id(2) * 16 + tl.arange(0, 16)
    cell = module * num_runs + segment
    offset, rank = load_factor(b_ptr, rank_ptr, cell, ALIGNED, RANK_STEP)
    if rank > tl.program_id(2) * 16:
        inside, has = n < high - low, (r < rank)[None, :]
        mask = inside[:, None] & has
        factor = offset + n[:, None] * rank + r[None, :]
        b = tl.load(values_ptr + factor, mask=mask, other=0.0)
        parts_row = parts_ptr + (tl.program_id(0).to(tl.int64) * num_tokens + first) * R
        product = tl.zeros((BLOCK_N, 16), dtype=tl.float32)
        for start in range(0, count, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            live = (t < count)[:, None]
            u = tl.load(
                u_ptr + (first + t)[:, None] * (NUM_M * R) + (module * R + r)[None, :],
                mask=live & has,
                other=0.0,
            )
            dy = tl.load(
                dy_ptr + (first + t)[:, None] * dy_stride + (low + n)[None, :],
                mask=live & inside[None, :],
                other=0.0,
            )
            product = tl.dot(tl.trans(dy), u, product, input_precision="ieee")
            part = tl.dot(dy, b, input_precision="ieee")
            tl.store(parts_row + t[:, None] * R + r[None, :], part, mask=live & has)
        product *= tl.load(scale_ptr + cell)
        if slot < 0:
            places = gradient_ptr + factor
            tl.store(places, tl.load(places, mask=mask, other=0.0) + product, mask=mask)
        else:
            row = slot.to(tl.int64) * out_width + low + n
            tl.store(slots_ptr + row[:, None] * R + r[None, :], product, mask=mask)


@jit("num_runs", "num_tokens")
def _sum_kernel(
    parts_ptr,
    du_ptr,
    rank_ptr,
    scale_ptr,
    blocks_ptr,
    num_runs,
    num_tokens,
    bound0,
    bound1,
    bound2,
    bound3,
    NUM_M: tl.constexpr,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(0))
    module = tl.program_id(1)
    blocks0 = tl.cdiv(bound1 - bound0, BLOCK_N)
    blocks1 = tl.cdiv(bound2 - bound1, BLOCK_N) if NUM_M > 1 else 0
    blocks2 = tl.cdiv(bound3 - bound2, BLOCK_N) if NUM_M > 2 else 0
    low = tl.where(module == 0, 0, tl.where(module == 1, blocks0, blocks0 + blocks1))
    blocks = tl.where(module == 0, blocks0, tl.where(module == 1, blocks1, blocks2))
    t, r = tl.arange(0, BLOCK_T), tl.program_id(2) * 16 + tl.arange(0, 16)
    cell = module * num_runs + segment
    rank = tl.load(rank_ptr + cell)
    if rank > tl.program_id(2) * 16:
        mask = (t < count)[:, None] & (r < rank)[None, :]
        total = tl.zeros((BLOCK_T, 16), dtype=tl.float32)
        for block in range(0, blocks):
            row = (low + block).to(tl.int64) * num_tokens + first + t
            total += tl.load(parts_ptr + row[:, None] * R + r[None, :], mask=mask, other=0.0)
        total *= tl.load(scale_ptr + cell)
        place = (first + t)[:, None] * (NUM_M * R) + (module * R + r)[None, :]
        tl.store(du_ptr + place, total.to(du_ptr.dtype.element_ty), mask=mask)


def lora_backward_b_triton(
    u: torch.Tensor,
    dy: torch.Tensor,
    values: torch.Tensor,
    gradient: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    *,
    block_t: int = 64,
    block_n: int = 256,
    num_warps: int = 4,
    num_stages: int = 2,
) -> torch.Tensor:
    """Add scale * dy^T u to the gradients of B; -> du [T, modules * padded rank], scaled.

    u [T, modules * padded rank], dy [T, out]
    """
    du, chunks = torch.empty_like(u), segments.chunks()
    if not len(chunks.table):
        return du
    out_width, num_tokens, rank = site.bounds[-1], dy.shape[0], site.padded_rank
    block_n, bounds = fit(block_n, out_width), padded_bounds(site)
    columns = column_blocks(site, block_n)
    slots = gradient.new_empty(chunks.slots, out_width, rank)
    parts = gradient.new_empty(columns, num_tokens, rank)
    common = {
        "rank_ptr": site.rank, "scale_ptr": site.scale, "num_runs": site.rank.shape[1],
        "num_tokens": num_tokens, "bound0": bounds[0], "bound1": bounds[1], "bound2": bounds[2],
        "bound3": bounds[3], "NUM_M": site.num_modules, "R": rank, "BLOCK_N": block_n,
    }  # fmt: skip
    _both_kernel[(columns, len(chunks.table), rank // 16)](
        u_ptr=u, dy_ptr=dy, values_ptr=values, gradient_ptr=gradient, slots_ptr=slots,
        parts_ptr=parts, b_ptr=site.b, chunks_ptr=chunks.table, dy_stride=dy.stride(0),
        out_width=out_width, ALIGNED=site.aligned, RANK_STEP=site.rank_step, BLOCK_T=block_t,
        num_warps=num_warps, num_stages=num_stages, **common,
    )  # fmt: skip
    merge_b(gradient, slots, site, chunks)
    blocks = segments.blocks(64)
    _sum_kernel[(len(blocks), site.num_modules, rank // 16)](
        parts_ptr=parts, du_ptr=du, blocks_ptr=blocks, BLOCK_T=64, num_warps=4, **common
    )
    return du
