"""The expand for long segments on a GPU: rank-space vectors times B^T, reading tiles in place.

A unit of work is a chunk of the plan times a block of output columns. For short segments see
expand_decode.py; the reference is `kernels.lora.apply.lora_expand_ref`.
"""

from __future__ import annotations

import itertools

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, num_launched, tl
from kernels.lora.expand_decode import lora_expand_decode_triton, put
from kernels.lora.plan import RANK_BLOCK, LoraPlan
from kernels.lora.shrink import load_record
from kernels.lora.table import LoraTable


@jit()
def tile_rows(entry, tile, tiles, b_offset_ptr, rows_ptr, width):
    """Return where 16 rank rows of B begin in the arena, and whether each exists.

    tile  [16], the tile of each row: two tiles, one after the other
    """
    r = tl.arange(0, 16)
    has = tile < tiles
    offset = tl.load(b_offset_ptr + entry + tile, mask=has, other=-1)
    has = has & (offset >= 0)
    has = has & (r % 8 < tl.load(rows_ptr + entry + tile, mask=has, other=0))
    return tl.multiple_of(tl.where(has, offset, 0), 8) + (r % 8) * width, has


@jit()
def lora_tile(
    count,
    first_entry,
    tiles,
    blocks,
    first_row,
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    layer,
    columns,
    width,
    projection,
    NUM_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return a chunk's adapter output for columns of one projection: [BLOCK_T, BLOCK_N] fp32."""
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, 16)
    entry = first_entry + (layer * 8 + projection) * tiles
    product = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for block in range(0, blocks):
        start, has = tile_rows(entry, block * 2 + r // 8, tiles, b_offset_ptr, rows_ptr, width)
        row = first_row + block * count + t
        h = tl.load(
            h_ptr + row[:, None] * (NUM_P * 16) + r[None, :], mask=(t < count)[:, None], other=0.0
        )
        b = tl.load(
            (arena_ptr + start)[:, None] + columns[None, :],
            mask=has[:, None] & (columns < width)[None, :],
            other=0.0,
        ).to(h.dtype)
        product = tl.dot(h, b, product, input_precision="ieee")
    return product


@jit("layer")
def _expand_kernel(
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    chunks_ptr,
    counts_ptr,
    y_ptr,
    y_stride,
    layer,
    bound0,
    bound1,
    bound2,
    bound3,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    NUM_P: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_N: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)
    # Column blocks of the projections one after the other; none crosses from one to the next.
    blocks0 = tl.cdiv(bound1 - bound0, BLOCK_N)
    blocks1 = tl.cdiv(bound2 - bound1, BLOCK_N) if NUM_P > 1 else 0
    blocks2 = tl.cdiv(bound3 - bound2, BLOCK_N) if NUM_P > 2 else 0
    num_blocks = blocks0 + blocks1 + blocks2
    unit = tl.program_id(0)
    # As in the shrink, the first record is loaded at the same time as the count.
    record = chunks_ptr + (unit // num_blocks).to(tl.int64) * 8
    first_row, count, first_entry, tiles, blocks, h_row = load_record(record)
    num_units = tl.load(counts_ptr) * num_blocks
    while unit < num_units:
        block = unit % num_blocks
        index = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
        low = tl.where(index == 0, bound0, tl.where(index == 1, bound1, bound2))
        high = tl.where(index == 0, bound1, tl.where(index == 1, bound2, bound3))
        before = tl.where(index == 0, 0, tl.where(index == 1, blocks0, blocks0 + blocks1))
        projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
        # In narrower parts, which fit into registers.
        for part in range(0, BLOCK_N // DOT_N):
            columns = (block - before) * BLOCK_N + part * DOT_N + tl.arange(0, DOT_N)
            product = lora_tile(
                count,
                first_entry,
                tiles,
                blocks,
                h_row,
                h_ptr + index * 16,
                arena_ptr,
                b_offset_ptr,
                rows_ptr,
                layer,
                columns,
                high - low,
                projection,
                NUM_P,
                BLOCK_T,
                DOT_N,
            )
            y_ptrs = y_ptr + (first_row + t)[:, None] * y_stride + (low + columns)[None, :]
            mask = (t < count)[:, None] & (low + columns < high)[None, :]
            put(y_ptrs, product, mask, ADD)
        unit += tl.num_programs(0)
        if unit < num_units:
            record = chunks_ptr + (unit // num_blocks).to(tl.int64) * 8
            first_row, count, first_entry, tiles, blocks, h_row = load_record(record)


def lora_expand_triton(
    h: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    layer: int,
    projections: tuple[int, ...],
    y: torch.Tensor,
    out_offsets: tuple[int, ...],
    *,
    add: bool = True,
    num_programs: int = 1056,
    block_n: int = 512,
    dot_n: int = 256,
    num_warps: int = 0,
    num_stages: int = 1,
) -> None:
    """Add to y; with add=False write to it, zeros for tokens without an adapter.

    The default options are for a plan with long segments.
    """
    if plan.block_t <= RANK_BLOCK:
        lora_expand_decode_triton(
            h, arena, table, plan, layer, projections, y, out_offsets, add=add
        )
        return
    widths = [high - low for low, high in itertools.pairwise(out_offsets)]
    block_n = min(block_n, max(16, next_power_of_2(max(widths))))
    num_blocks = sum(ceil_div(width, block_n) for width in widths)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    bounds = (*out_offsets, 0, 0)[:4]
    programs = min(num_launched(num_programs, h.device), plan.chunks.shape[0] * num_blocks)
    _expand_kernel[(programs,)](
        h_ptr=h,
        arena_ptr=arena,
        b_offset_ptr=table.b_offset,
        rows_ptr=table.rows,
        chunks_ptr=plan.chunks,
        counts_ptr=plan.counts,
        y_ptr=y,
        y_stride=y.stride(0),
        layer=layer,
        bound0=bounds[0],
        bound1=bounds[1],
        bound2=bounds[2],
        bound3=bounds[3],
        P0=p0,
        P1=p1,
        P2=p2,
        NUM_P=len(projections),
        ADD=add,
        BLOCK_T=plan.block_t,
        BLOCK_N=block_n,
        DOT_N=min(block_n, dot_n),
        num_warps=num_warps or max(1, min(4, block_n // 256)),
        num_stages=num_stages,
    )
