"""The shrink on a GPU: projects tokens into their adapter's rank space, reading tiles in place.

A unit of work is an item of the plan (a chunk of tokens times 16 rank rows of each projection that
shares the input) times a part of the inner dimension. In a step with many segments of one or two
tokens, it is four rank rows of one projection over the whole inner dimension: no program waits for
another. The reference is `kernels.lora.apply.lora_shrink_ref`.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, num_launched, tl
from kernels.lora.plan import MANY_CHUNKS, RANK_BLOCK, LoraPlan
from kernels.lora.table import LoraTable


@jit()
def load_record(record):
    """Load the words of a chunk's or an item's record, see LoraPlan."""
    return (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
        tl.load(record + 5),
    )


@jit()
def lora_rows(
    x_row,
    x_step,
    first,
    entry,
    is_there,
    arena_ptr,
    a_offset_ptr,
    rows_ptr,
    scale_ptr,
    width,
    IS_PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_K: tl.constexpr,
):
    """Multiply a token by ROWS rank rows of a tile, scaled: [ROWS] fp32, zeros for missing rows.

    It does not use tensor cores: a thread has the same 8 columns of all rows, so that ROWS loads
    are in flight. It sums its own products; threads exchange their sums once, at the end.

    x_step   elements from the token to the next one, which is multiplied too if IS_PAIR
    first    the first of the rows
    returns  the results of both tokens; for a single token the same result twice
    """
    r = first + tl.arange(0, ROWS)
    offset = tl.load(a_offset_ptr + entry, mask=is_there, other=-1)
    rows = tl.load(rows_ptr + entry, mask=is_there, other=0)
    scale = tl.load(scale_ptr + entry, mask=is_there, other=0.0)
    rows = tl.where(offset >= 0, rows, 0)
    a_rows = arena_ptr + tl.multiple_of(tl.maximum(offset, 0), 8) + r * width
    total = tl.zeros((ROWS, ROW_K // 8), dtype=tl.float32)
    other_total = total
    for k in range(0, tl.where(rows > first, width, 0), ROW_K):
        columns = k + tl.arange(0, ROW_K)
        inside = columns < width
        x = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
        # Each value is read once, so it must not evict from the cache what others read again.
        a = tl.load(
            a_rows[:, None] + columns[None, :],
            mask=(r < rows)[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        total += tl.sum(tl.reshape(a * x[None, :], (ROWS, ROW_K // 8, 8)), axis=2)
        if IS_PAIR:
            x = tl.load(x_row + x_step + columns, mask=inside, other=0.0).to(tl.float32)
            other_total += tl.sum(tl.reshape(a * x[None, :], (ROWS, ROW_K // 8, 8)), axis=2)
    row = tl.sum(total, axis=1) * scale
    return row, tl.sum(other_total, axis=1) * scale if IS_PAIR else row


@jit()
def shrink_few(
    unit,
    num_items,
    x_ptr,
    x_stride,
    arena_ptr,
    a_offset_ptr,
    rows_ptr,
    scale_ptr,
    items_ptr,
    h_ptr,
    width,
    layer,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    NUM_P: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_K: tl.constexpr,
):
    """Compute the units of items of few tokens: ROWS rank rows of a projection each.

    Returns the program's next unit, counted from the first one after these.
    """
    PARTS: tl.constexpr = 16 // ROWS
    while unit < num_items * (NUM_P * PARTS):
        record = items_ptr + (unit // (NUM_P * PARTS)).to(tl.int64) * 8
        first_row, count, first_entry, tiles, block, out_row = load_record(record)
        first, index = unit % PARTS * ROWS, unit // PARTS % NUM_P
        projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
        tile = block * 2 + first // 8
        entry = first_entry + (layer * 8 + projection) * tiles + tile
        x_row = x_ptr + first_row * x_stride
        h_row = h_ptr + out_row * (NUM_P * 16) + index * 16 + first + tl.arange(0, ROWS)
        # Two loops: the loop for two tokens computes twice as much with the same loads.
        if count == 1:
            row, _ = lora_rows(
                x_row,
                x_stride,
                first % 8,
                entry,
                tile < tiles,
                arena_ptr,
                a_offset_ptr,
                rows_ptr,
                scale_ptr,
                width,
                False,
                ROWS,
                ROW_K,
            )
            tl.store(h_row, row.to(h_ptr.dtype.element_ty))
        else:
            row, other_row = lora_rows(
                x_row,
                x_stride,
                first % 8,
                entry,
                tile < tiles,
                arena_ptr,
                a_offset_ptr,
                rows_ptr,
                scale_ptr,
                width,
                True,
                ROWS,
                ROW_K,
            )
            tl.store(h_row, row.to(h_ptr.dtype.element_ty))
            tl.store(h_row + NUM_P * 16, other_row.to(h_ptr.dtype.element_ty))
        unit += tl.num_programs(0)
    return unit - num_items * (NUM_P * PARTS)


@jit("layer", "max_items")
def _shrink_kernel(
    x_ptr,
    arena_ptr,
    a_offset_ptr,
    rows_ptr,
    scale_ptr,
    items_ptr,
    max_items,
    counts_ptr,
    arrived_ptr,
    planes_ptr,
    plane_stride,
    h_ptr,
    x_stride,
    width,
    layer,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    NUM_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_K: tl.constexpr,
):
    n = tl.arange(0, BLOCK_R)  # 16 rank rows of each projection, one after the other
    index = n // 16
    projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
    t = tl.arange(0, BLOCK_T)
    split_width = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    unit = tl.program_id(0)
    num_few = 0
    if ROW_K > 0:
        # Items of few tokens come first.
        num_few = tl.load(counts_ptr + 3)
        unit = shrink_few(
            unit,
            num_few,
            x_ptr,
            x_stride,
            arena_ptr,
            a_offset_ptr,
            rows_ptr,
            scale_ptr,
            items_ptr,
            h_ptr,
            width,
            layer,
            P0,
            P1,
            P2,
            NUM_P,
            ROWS,
            ROW_K,
        )
    # The first record is loaded at the same time as the number of records, not after it.
    item = tl.minimum(num_few + unit // SPLITS, max_items - 1)
    record = items_ptr + item.to(tl.int64) * 8
    first_row, count, first_entry, tiles, block, out_row = load_record(record)
    num_units = (tl.load(counts_ptr + 1) - num_few) * SPLITS
    while unit < num_units:
        item = num_few + unit // SPLITS
        split = unit % SPLITS
        tile = block * 2 + (n % 16) // 8
        entry = first_entry + (layer * 8 + projection) * tiles + tile
        has = (n < NUM_P * 16) & (tile < tiles)
        offset = tl.load(a_offset_ptr + entry, mask=has, other=-1)
        has = has & (offset >= 0)
        has = has & (n % 8 < tl.load(rows_ptr + entry, mask=has, other=0))
        scale = tl.load(scale_ptr + entry, mask=has, other=0.0)
        offset = tl.multiple_of(tl.where(has, offset, 0), 8)
        a_rows = arena_ptr + offset + (n % 8) * width
        x_rows = x_ptr + (first_row + t) * x_stride
        product = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        low = split * split_width
        for k in range(low, tl.minimum(low + split_width, width), BLOCK_K):
            columns = k + tl.arange(0, BLOCK_K)
            inside = columns < width
            x = tl.load(
                x_rows[:, None] + columns[None, :],
                mask=(t < count)[:, None] & inside[None, :],
                other=0.0,
            )
            a = tl.load(
                a_rows[:, None] + columns[None, :],
                mask=has[:, None] & inside[None, :],
                other=0.0,
            ).to(x.dtype)
            product = tl.dot(x, tl.trans(a), product, input_precision="ieee")
        place = (out_row + t)[:, None] * (NUM_P * 16) + n[None, :]
        mask = (t < count)[:, None] & (n < NUM_P * 16)[None, :]
        is_last = True
        if SPLITS > 1:
            tl.store(planes_ptr + split.to(tl.int64) * plane_stride + place, product, mask=mask)
            tl.debug_barrier()  # all threads have stored their part before one thread counts it
            is_last = tl.atomic_add(arrived_ptr + item, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            if SPLITS > 1:
                product = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
                for other in tl.static_range(SPLITS):
                    product += tl.load(
                        planes_ptr + other * plane_stride + place,
                        mask=mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                tl.store(arrived_ptr + item, 0)  # for the next launch
            h = (product * scale[None, :]).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + place, h, mask=mask)
        unit += tl.num_programs(0)
        if unit < num_units:
            record = items_ptr + (num_few + unit // SPLITS).to(tl.int64) * 8
            first_row, count, first_entry, tiles, block, out_row = load_record(record)


def shrink_splits(width: int, num_projections: int, plan: LoraPlan) -> int:
    """Return into how many parts a shrink of this inner width is split.

    A step of few chunks fills the GPU only if it is split finely; a step of many is faster with
    fewer parts to sum. Measured on an H200 (docs/history/performance.md).
    """
    if plan.block_t > RANK_BLOCK:
        return 1
    part = 256 if plan.chunks.shape[0] <= MANY_CHUNKS else 512 if num_projections < 3 else 1024
    return max(1, min(32, width // (part if width <= 4096 else 2 * part)))


def row_warps(plan: LoraPlan) -> int:
    """Return the warps of a program if few tokens get units of their own; 0: they do not.

    Such units pay off only if there are enough of them to fill the GPU. More warps take fewer
    iterations for a unit, but the product of longer segments, in the same kernel, is fastest with
    four. Measured on an H200 (docs/history/performance.md).
    """
    chunks = plan.chunks.shape[0]
    if plan.block_t > RANK_BLOCK or chunks <= MANY_CHUNKS:
        return 0
    return 8 if chunks <= 64 else 4


def row_elements(plan: LoraPlan, width: int, num_warps: int) -> int:
    """Return how many elements of x such a unit reads at a time, 8 per thread; 0: none."""
    return min(256 * num_warps, max(16, next_power_of_2(width))) if row_warps(plan) else 0


def lora_shrink_triton(
    x: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    layer: int,
    projections: tuple[int, ...],
    *,
    num_programs: int = 1056,
    block_k: int = 0,
    rows: int = 4,
    row_k: int = -1,
    splits: int = 0,
    num_warps: int = 0,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [T, in] -> h [plan.max_rows, len(projections) * 16] in x's dtype, scaled.

    rows, row_k  of units of few tokens: rank rows, elements of x read at a time (0: no such units)
    """
    width = x.shape[1]
    splits = splits or shrink_splits(width, len(projections), plan)
    block_k = block_k or max(16, min(128, next_power_of_2(width)))
    num_warps = num_warps or row_warps(plan) or 4
    row_k = row_elements(plan, width, num_warps) if row_k < 0 else row_k
    h = x.new_empty(plan.max_rows, len(projections) * RANK_BLOCK)
    planes = torch.empty(splits, *h.shape, dtype=torch.float32, device=x.device)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    units = len(plan.items) * max(splits, RANK_BLOCK // rows * len(projections) if row_k else 1)
    _shrink_kernel[(min(num_launched(num_programs, x.device), units),)](
        x_ptr=x,
        arena_ptr=arena,
        a_offset_ptr=table.a_offset,
        rows_ptr=table.rows,
        scale_ptr=table.scale,
        items_ptr=plan.items,
        max_items=plan.items.shape[0],
        counts_ptr=plan.counts,
        arrived_ptr=plan.arrived,
        planes_ptr=planes,
        plane_stride=planes.stride(0),
        h_ptr=h,
        x_stride=x.stride(0),
        width=width,
        layer=layer,
        P0=p0,
        P1=p1,
        P2=p2,
        NUM_P=len(projections),
        BLOCK_R=next_power_of_2(len(projections) * RANK_BLOCK),
        BLOCK_T=plan.block_t,
        BLOCK_K=block_k,
        SPLITS=splits,
        ROWS=rows,
        ROW_K=row_k,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=(64 if num_warps > 4 else 128) if row_k else None,
    )
    return h
