"""The expand for segments of few tokens: a chunk gets programs in proportion to its rank.

A unit of work is an item of the plan times a group of output columns. A chunk of n items cuts each
group into parts, more for a higher rank, and its items share them. So a unit reads 16 rank rows of
512 columns for any rank, or twice that beyond rank 128, and an adapter of high rank does not delay
the others. The reference is `kernels.lora.apply.lora_expand_ref`.
"""

from __future__ import annotations

import itertools

import torch

from kernels.backend import ceil_div, jit, num_launched, tl
from kernels.lora.plan import FEW_TOKENS, LoraPlan
from kernels.lora.shrink import load_record
from kernels.lora.table import LoraTable


@jit()
def load_tile(arena_ptr, b_offset_ptr, rows_ptr, entry, tile, tiles, column, width):
    """Load the eight rows of each lane's tile at its eight columns: eight of [LANES, 8].

    Missing rows are zero. Each row is a load of its own: with the rows as an axis, the compiler
    might spread them over lanes, which costs shuffles.
    """
    has = tile < tiles
    offset = tl.load(b_offset_ptr + entry + tile, mask=has, other=-1)
    rows = tl.load(rows_ptr + entry + tile, mask=has, other=0)
    rows = tl.where(offset >= 0, rows, 0)[:, None]
    offset = tl.multiple_of(tl.maximum(offset, 0), 8)
    c = tl.arange(0, 8)
    p = (arena_ptr + offset + column)[:, None] + c[None, :]
    ok = column[:, None] + c[None, :] < width
    # Each value is read once, so it must not evict from the cache what others read again.
    return (
        tl.load(p, mask=ok & (rows > 0), other=0.0, eviction_policy="evict_first"),
        tl.load(p + width, mask=ok & (rows > 1), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 2 * width, mask=ok & (rows > 2), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 3 * width, mask=ok & (rows > 3), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 4 * width, mask=ok & (rows > 4), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 5 * width, mask=ok & (rows > 5), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 6 * width, mask=ok & (rows > 6), other=0.0, eviction_policy="evict_first"),
        tl.load(p + 7 * width, mask=ok & (rows > 7), other=0.0, eviction_policy="evict_first"),
    )


@jit()
def load_h(p, has):
    """Load eight rank-space values of one token, each [LANES]."""
    return (
        tl.load(p, mask=has, other=0.0),
        tl.load(p + 1, mask=has, other=0.0),
        tl.load(p + 2, mask=has, other=0.0),
        tl.load(p + 3, mask=has, other=0.0),
        tl.load(p + 4, mask=has, other=0.0),
        tl.load(p + 5, mask=has, other=0.0),
        tl.load(p + 6, mask=has, other=0.0),
        tl.load(p + 7, mask=has, other=0.0),
    )


@jit()
def add_tile(total, h, b):
    """Return total [LANES, 8] plus the sum of h * b over a tile's rows, in fp32."""
    for row in tl.static_range(8):
        total += h[row].to(tl.float32)[:, None] * b[row].to(tl.float32)
    return total


@jit()
def lora_lanes(
    h_ptr,
    h_step,
    entry,
    tiles,
    num_items,
    lane_item,
    lane_items,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    column,
    width,
    LANES: tl.constexpr,
):
    """Return partial sums [LANES, 8] of one token's adapter output: add lanes of the same columns.

    It does not use tensor cores, where 15 of 16 rows would be empty.

    h_ptr       the token's rank-space values of the first item; each next item is h_step further
    lane_item   [LANES], the first item that a lane computes; it computes every lane_items-th
    column      [LANES], the first of a lane's columns
    """
    total = tl.zeros((LANES, 8), dtype=tl.float32)
    for first in range(0, num_items, lane_items):
        item = first + lane_item
        tile = item * 2
        b0 = load_tile(arena_ptr, b_offset_ptr, rows_ptr, entry, tile, tiles, column, width)
        b1 = load_tile(arena_ptr, b_offset_ptr, rows_ptr, entry, tile + 1, tiles, column, width)
        h_ptrs = h_ptr + item * h_step
        h0 = load_h(h_ptrs, tile < tiles)
        h1 = load_h(h_ptrs + 8, tile < tiles)
        total = add_tile(total, h0, b0)
        total = add_tile(total, h1, b1)
    return total


@jit()
def item_rows(entry, item, tiles, b_offset_ptr, rows_ptr, width):
    """Return where 16 rank rows of B begin in the arena, and whether each exists."""
    r = tl.arange(0, 16)
    tile = item * 2
    offset0 = tl.load(b_offset_ptr + entry + tile)
    offset1 = tl.load(b_offset_ptr + entry + tile + 1, mask=tile + 1 < tiles, other=-1)
    rows0 = tl.load(rows_ptr + entry + tile)
    rows1 = tl.load(rows_ptr + entry + tile + 1, mask=tile + 1 < tiles, other=0)
    offset = tl.where(r < 8, offset0, offset1)
    has = (offset >= 0) & (r % 8 < tl.where(r < 8, rows0, rows1))
    return tl.multiple_of(tl.where(has, offset, 0), 8) + (r % 8) * width, has


@jit()
def lora_columns(
    h_ptr,
    h_step,
    entry,
    tiles,
    num_items,
    count,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    columns,
    width,
    H_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return several tokens' adapter output for columns of one projection: [BLOCK_T, BLOCK_N]."""
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, 16)
    product = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for item in range(0, num_items):
        start, has = item_rows(entry, item, tiles, b_offset_ptr, rows_ptr, width)
        h = tl.load(
            h_ptr + item * h_step + t[:, None] * H_STRIDE + r[None, :],
            mask=(t < count)[:, None],
            other=0.0,
        )
        b = tl.load(
            (arena_ptr + start)[:, None] + columns[None, :],
            mask=has[:, None] & (columns < width)[None, :],
            other=0.0,
        ).to(h.dtype)
        product = tl.dot(h, b, product, input_precision="ieee")
    return product


@jit()
def put(y_ptrs, values, mask, ADD: tl.constexpr):
    """Write fp32 values to y; with ADD add them to its values."""
    if ADD:
        values += tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, values.to(y_ptrs.dtype.element_ty), mask=mask)


@jit()
def put_lanes(y_row, total, left, PARTS: tl.constexpr, LANES: tl.constexpr, ADD: tl.constexpr):
    """Sum the PARTS lanes that have the same columns, and write the first `left` columns."""
    columns = tl.arange(0, LANES // PARTS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    values = tl.sum(tl.reshape(total, (PARTS, LANES // PARTS, 8)), axis=0)
    put(y_row + columns, values, columns < left, ADD)


@jit("layer")
def _expand_decode_kernel(
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    items_ptr,
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
    FEW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP_N: tl.constexpr,
    DOT_N: tl.constexpr,
):
    LANES: tl.constexpr = GROUP_N // 8
    H_STRIDE: tl.constexpr = NUM_P * 16
    t = tl.arange(0, BLOCK_T)
    lane = tl.arange(0, LANES)
    # Column groups of the projections one after the other; none crosses from one to the next.
    groups0 = tl.cdiv(bound1 - bound0, GROUP_N)
    groups1 = tl.cdiv(bound2 - bound1, GROUP_N) if NUM_P > 1 else 0
    groups2 = tl.cdiv(bound3 - bound2, GROUP_N) if NUM_P > 2 else 0
    num_groups = groups0 + groups1 + groups2
    unit = tl.program_id(0)
    # As in the shrink, the first record is loaded at the same time as the count.
    record = items_ptr + (unit // num_groups).to(tl.int64) * 8
    first_row, count, first_entry, tiles, block, h_row = load_record(record)
    num_units = tl.load(counts_ptr + 2) * num_groups
    while unit < num_units:
        group = unit % num_groups
        index = (group >= groups0).to(tl.int32) + (group >= groups0 + groups1).to(tl.int32)
        low = tl.where(index == 0, bound0, tl.where(index == 1, bound1, bound2))
        high = tl.where(index == 0, bound1, tl.where(index == 1, bound2, bound3))
        before = tl.where(index == 0, 0, tl.where(index == 1, groups0, groups0 + groups1))
        projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
        width, group_start = high - low, (group - before) * GROUP_N
        entry = first_entry + (layer * 8 + projection) * tiles
        num_items, item = tl.maximum((tiles + 1) // 2, 1).to(tl.int32), block.to(tl.int32)
        chunk_h_ptr = h_ptr + (h_row - block * count) * H_STRIDE + index * 16
        h_step = count * H_STRIDE
        if count <= FEW:
            log_parts = (num_items > 1).to(tl.int32) + (num_items > 2).to(tl.int32)
            log_parts += (num_items > 4).to(tl.int32)
            part_lanes = LANES >> log_parts
            for part in range(item, 1 << log_parts, num_items):
                start = group_start + part * (GROUP_N >> log_parts)
                column = tl.multiple_of(start + (lane & (part_lanes - 1)) * 8, 8)
                for token in range(0, count):
                    total = lora_lanes(
                        chunk_h_ptr + token * H_STRIDE,
                        h_step,
                        entry,
                        tiles,
                        num_items,
                        (lane << log_parts) // LANES,
                        1 << log_parts,
                        arena_ptr,
                        b_offset_ptr,
                        rows_ptr,
                        column,
                        width,
                        LANES,
                    )
                    y_row = y_ptr + (first_row + token) * y_stride + low + start
                    if log_parts == 0:
                        put_lanes(y_row, total, width - start, 1, LANES, ADD)
                    elif log_parts == 1:
                        put_lanes(y_row, total, width - start, 2, LANES, ADD)
                    elif log_parts == 2:
                        put_lanes(y_row, total, width - start, 4, LANES, ADD)
                    else:
                        put_lanes(y_row, total, width - start, 8, LANES, ADD)
        else:
            for part in range(item, GROUP_N // DOT_N, num_items):
                columns = group_start + part * DOT_N + tl.arange(0, DOT_N)
                product = lora_columns(
                    chunk_h_ptr,
                    h_step,
                    entry,
                    tiles,
                    (tiles + 1) // 2,
                    count,
                    arena_ptr,
                    b_offset_ptr,
                    rows_ptr,
                    columns,
                    width,
                    H_STRIDE,
                    BLOCK_T,
                    DOT_N,
                )
                y_ptrs = y_ptr + (first_row + t)[:, None] * y_stride + (low + columns)[None, :]
                put(y_ptrs, product, (t < count)[:, None] & (columns < width)[None, :], ADD)
        unit += tl.num_programs(0)
        if unit < num_units:
            record = items_ptr + (unit // num_groups).to(tl.int64) * 8
            first_row, count, first_entry, tiles, block, h_row = load_record(record)


def lora_expand_decode_triton(
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
    num_programs: int = 4224,
    group_n: int = 512,
    few: int = FEW_TOKENS,
    dot_n: int = 128,
    max_registers: int = 128,
) -> None:
    """Add to y; with add=False write to it, zeros for tokens without an adapter.

    num_programs   several times as many as fit on the GPU: while a matrix product occupies most
                   multiprocessors, a program that starts late must have little to do
    group_n        columns of a group: 8 per lane, 256 per warp; at rank 128, an eighth of a row
    few            the most tokens of a chunk that are computed without tensor cores
    max_registers  of a thread; with 128, 16 warps run on a multiprocessor
    """
    widths = [high - low for low, high in itertools.pairwise(out_offsets)]
    num_groups = sum(ceil_div(width, group_n) for width in widths)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    bounds = (*out_offsets, 0, 0)[:4]
    programs = min(num_launched(num_programs, h.device), plan.items.shape[0] * num_groups)
    _expand_decode_kernel[(programs,)](
        h_ptr=h,
        arena_ptr=arena,
        b_offset_ptr=table.b_offset,
        rows_ptr=table.rows,
        items_ptr=plan.items,
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
        FEW=few,
        BLOCK_T=plan.block_t,
        GROUP_N=group_n,
        DOT_N=min(group_n, dot_n),
        num_warps=max(1, group_n // 256),
        num_stages=1,
        maxnreg=max_registers,
    )
