"""The shrink on a GPU: every token into its adapter's rank space, over tiles where they lie.

A unit of work is an item of the plan (a chunk of tokens times 16 rank rows of each projection that
shares the input) times a part of the inner dimension. Where a step has many segments of a single
token, it is a tile's rows of one projection, whole: nobody waits for another's part.
See `kernels.lora.lora_shrink_ref`.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.lora_plan import RANK_BLOCK, LoraPlan
from kernels.lora_table import LoraTable


@jit()
def load_record(record):
    """The words of a chunk's or an item's record, see LoraPlan."""
    return (
        tl.load(record),
        tl.load(record + 1),
        tl.load(record + 2),
        tl.load(record + 3),
        tl.load(record + 4),
        tl.load(record + 5),
    )


@jit()
def lora_tile_row(
    x_row,
    entry,
    is_there,
    arena_ptr,
    a_offset_ptr,
    rows_ptr,
    scale_ptr,
    width,
    ROW_K: tl.constexpr,
):
    """One token times the 8 rank rows of a tile, scaled: [8] fp32, zeros where there is no row.

    Without tensor cores: a thread has the same 8 columns of all rows, so that it has 8 loads in
    flight and sums its own products; threads exchange theirs once, at the end.
    """
    r = tl.arange(0, 8)
    offset = tl.load(a_offset_ptr + entry, mask=is_there, other=-1)
    rows = tl.load(rows_ptr + entry, mask=is_there, other=0)
    scale = tl.load(scale_ptr + entry, mask=is_there, other=0.0)
    rows = tl.where(offset >= 0, rows, 0)
    a_rows = arena_ptr + tl.multiple_of(tl.maximum(offset, 0), 8) + r * width
    total = tl.zeros((8, ROW_K // 8), dtype=tl.float32)
    for k in range(0, tl.where(rows > 0, width, 0), ROW_K):
        columns = k + tl.arange(0, ROW_K)
        inside = columns < width
        x = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
        # Read once: what others read again stays in the cache.
        a = tl.load(
            a_rows[:, None] + columns[None, :],
            mask=(r < rows)[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        products = tl.reshape(a.to(tl.float32) * x[None, :], (8, ROW_K // 8, 8))
        total += tl.sum(products, axis=2)
    return tl.sum(total, axis=1) * scale


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
    ROW_K: tl.constexpr,
):
    n = tl.arange(0, BLOCK_R)  # 16 rank rows of each projection, one under the other
    index = n // 16
    projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
    t = tl.arange(0, BLOCK_T)
    split_width = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    unit = tl.program_id(0)
    num_singles = 0
    if ROW_K > 0:
        # Items of single tokens are the first, with a unit for each projection's two tiles.
        num_singles = tl.load(counts_ptr + 3)
        while unit < num_singles * (NUM_P * 2):
            record = items_ptr + (unit // (NUM_P * 2)).to(tl.int64) * 8
            first_row, count, first_entry, tiles, block, out_row = load_record(record)
            half, part = unit % 2, unit // 2 % NUM_P
            part_projection = tl.where(part == 0, P0, tl.where(part == 1, P1, P2))
            row = lora_tile_row(
                x_ptr + first_row * x_stride,
                first_entry + (layer * 7 + part_projection) * tiles + block * 2 + half,
                block * 2 + half < tiles,
                arena_ptr,
                a_offset_ptr,
                rows_ptr,
                scale_ptr,
                width,
                ROW_K,
            )
            row_ptrs = h_ptr + out_row * (NUM_P * 16) + part * 16 + half * 8 + tl.arange(0, 8)
            tl.store(row_ptrs, row.to(h_ptr.dtype.element_ty))
            unit += tl.num_programs(0)
        unit -= num_singles * (NUM_P * 2)
    # The first record is loaded beside the count of records, not after it.
    item = tl.minimum(num_singles + unit // SPLITS, max_items - 1)
    record = items_ptr + item.to(tl.int64) * 8
    first_row, count, first_entry, tiles, block, out_row = load_record(record)
    num_units = (tl.load(counts_ptr + 1) - num_singles) * SPLITS
    while unit < num_units:
        item = num_singles + unit // SPLITS
        split = unit % SPLITS
        tile = block * 2 + (n % 16) // 8
        entry = first_entry + (layer * 7 + projection) * tiles + tile
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
            )
            product = tl.dot(x, tl.trans(a), product, input_precision="ieee")
        place = (out_row + t)[:, None] * (NUM_P * 16) + n[None, :]
        mask = (t < count)[:, None] & (n < NUM_P * 16)[None, :]
        is_last = True
        if SPLITS > 1:
            tl.store(planes_ptr + split.to(tl.int64) * plane_stride + place, product, mask=mask)
            tl.debug_barrier()  # every thread's part is stored before one thread says so
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
                tl.store(arrived_ptr + item, 0)  # as the next launch wants to find it
            h = (product * scale[None, :]).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + place, h, mask=mask)
        unit += tl.num_programs(0)
        if unit < num_units:
            record = items_ptr + (num_singles + unit // SPLITS).to(tl.int64) * 8
            first_row, count, first_entry, tiles, block, out_row = load_record(record)


def shrink_splits(width: int, num_projections: int, plan: LoraPlan) -> int:
    """Into how many parts a shrink of this inner width is split.

    A step of few chunks fills the card only when split finely; one of many is faster with less
    to sum. Measured on an H200 (docs/performance.md).
    """
    if plan.block_t > RANK_BLOCK:
        return 1
    part = 256 if plan.chunks.shape[0] <= 16 else 512 if num_projections < 3 else 1024
    return max(1, min(32, width // (part if width <= 4096 else 2 * part)))


def row_warps(plan: LoraPlan) -> int:
    """Warps of a program where single tokens have units of their own; 0: they have none.

    Such a unit takes as long as it has steps, so they pay where there are enough for the card. More
    warps are fewer steps, but the product of longer segments, in the same kernel, wants four.
    Measured on an H200 (docs/performance.md).
    """
    chunks = plan.chunks.shape[0]
    if plan.block_t > RANK_BLOCK or chunks <= 16:
        return 0
    return 8 if chunks <= 64 else 4


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
    row_k: int = -1,
    splits: int = 0,
    num_warps: int = 0,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [T, in] -> h [plan.max_rows, len(projections) * 16] in x's dtype, scaled.

    row_k  elements of x at a time where single tokens have units of their own; 0: they have none
    """
    width = x.shape[1]
    splits = splits or shrink_splits(width, len(projections), plan)
    block_k = block_k or max(16, min(128, next_power_of_2(width)))
    num_warps = num_warps or row_warps(plan) or 4
    if row_k < 0:
        row_k = min(256 * num_warps, max(16, next_power_of_2(width))) if row_warps(plan) else 0
    shape = (plan.max_rows, len(projections) * RANK_BLOCK)
    planes = torch.empty(splits, *shape, dtype=torch.float32, device=x.device)
    h = torch.empty(shape, dtype=x.dtype, device=x.device)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    num_units = plan.items.shape[0] * max(splits, 2 * len(projections) if row_k else 1)
    _shrink_kernel[(min(num_programs, num_units),)](
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
        ROW_K=row_k,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=(80 if num_warps > 4 else 128) if row_k else None,
    )
    return h
