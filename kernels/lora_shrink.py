"""The shrink on a GPU: every token into its adapter's rank space, over tiles where they lie.

A unit of work is an item of the plan (a chunk of tokens times 16 rank rows of each projection that
shares the input) times a part of the inner dimension. See `kernels.lora.lora_shrink_ref`.
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


@jit("layer")
def _shrink_kernel(
    x_ptr,
    arena_ptr,
    a_offset_ptr,
    rows_ptr,
    scale_ptr,
    items_ptr,
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
):
    n = tl.arange(0, BLOCK_R)  # 16 rank rows of each projection, one under the other
    index = n // 16
    projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
    t = tl.arange(0, BLOCK_T)
    split_width = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    unit = tl.program_id(0)
    # The first record is loaded beside the count of records, not after it.
    record = items_ptr + (unit // SPLITS).to(tl.int64) * 8
    first_row, count, first_entry, tiles, block, out_row = load_record(record)
    num_units = tl.load(counts_ptr + 1) * SPLITS
    while unit < num_units:
        item = unit // SPLITS
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
            record = items_ptr + (unit // SPLITS).to(tl.int64) * 8
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
    splits: int = 0,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [T, in] -> h [plan.max_rows, len(projections) * 16] in x's dtype, scaled."""
    width = x.shape[1]
    splits = splits or shrink_splits(width, len(projections), plan)
    block_k = block_k or max(16, min(128, next_power_of_2(width)))
    shape = (plan.max_rows, len(projections) * RANK_BLOCK)
    planes = torch.empty(splits, *shape, dtype=torch.float32, device=x.device)
    h = torch.empty(shape, dtype=x.dtype, device=x.device)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    _shrink_kernel[(min(num_programs, plan.items.shape[0] * splits),)](
        x_ptr=x,
        arena_ptr=arena,
        a_offset_ptr=table.a_offset,
        rows_ptr=table.rows,
        scale_ptr=table.scale,
        items_ptr=plan.items,
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
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return h
