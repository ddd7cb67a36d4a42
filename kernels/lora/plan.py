"""LoraPlan: a step's LoRA work as a list on the device, built once and read by every layer.

A segment (tokens of one virtual adapter) is cut into *chunks* of at most `block_t` tokens; a chunk
times 16 rank rows (two tiles) is an *item*, the unit of the shrink. In a decode the expand walks
items as well, so that a chunk gets programs in proportion to its rank. With long segments the
expand, and kernels that include it, walk chunks. Both lists and their lengths are on the device,
and no kernel's grid depends on them: so one CUDA graph serves every mix of adapters and ranks.

The rank-space vectors of all items lie in rows `[rows, projections * 16]`, an item's tokens one
after the other. In a shrink, each split of the inner dimension writes a plane of its own, and the
last one to finish sums the planes in order: nothing is zeroed, and the bits are always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.lora.table import LoraBatch

RANK_BLOCK = 16  # the smallest inner dimension of a matrix product on tensor cores
FEW_TOKENS = 2  # segments up to this long do without tensor cores, where most rows would be empty
MANY_CHUNKS = 16  # more chunks than this fill a GPU without being split finely
RECORD = 8  # int64 words of a chunk's record, 64 bytes
TILE_T = 128  # rows of a tile of a long product


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The work list of a step.

    chunks    [C, 8] int64  first row, tokens, entry of (layer 0, projection 0, tile 0), tiles,
                            rank blocks (0: base only), first rank-space row; its segment's
                            first row and tokens
    items     [J, 8] int64  the first six words of its chunk, but with the item's rank block and
                            rank-space row; first items of segments of up to FEW_TOKENS, then those
                            of longer ones, then one for every chunk without an adapter
    counts    [4] int32     chunks, items with an adapter, items, items of up to FEW_TOKENS

    An item repeats its chunk's record, so that a kernel needs only one load: at a decode's sizes,
    loads that depend on each other take most of the time.

    tile_chunks  [ceil(T / TILE_T)] int32  the chunk in which each tile of rows begins
    arrived   [J] int32     splits of an item that are done; zero between launches
    block_t                 most tokens in a chunk
    max_rows                most rows of rank-space vectors
    """

    chunks: torch.Tensor
    items: torch.Tensor
    counts: torch.Tensor
    tile_chunks: torch.Tensor
    arrived: torch.Tensor
    block_t: int
    max_rows: int


def empty_plan(
    num_tokens: int, num_segments: int, max_blocks: int, block_t: int, device: torch.device
) -> LoraPlan:
    """Allocate the work list of any step with at most these tokens, segments and blocks."""
    max_chunks = min(num_tokens, ceil_div(num_tokens, block_t) + num_segments)
    max_items = max_chunks * max(max_blocks, 1)
    return LoraPlan(
        chunks=torch.zeros(max_chunks, RECORD, dtype=torch.int64, device=device),
        items=torch.zeros(max_items, RECORD, dtype=torch.int64, device=device),
        counts=torch.zeros(4, dtype=torch.int32, device=device),
        tile_chunks=torch.zeros(ceil_div(num_tokens, TILE_T), dtype=torch.int32, device=device),
        arrived=torch.zeros(max_items, dtype=torch.int32, device=device),
        block_t=block_t,
        max_rows=num_tokens * max(max_blocks, 1),
    )


@jit("num_segments")
def _plan_kernel(
    seg_indptr_ptr,
    seg_adapter_ptr,
    entry_start_ptr,
    num_tiles_ptr,
    chunks_ptr,
    items_ptr,
    counts_ptr,
    tile_chunks_ptr,
    num_segments,
    max_items,
    FEW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILE_T: tl.constexpr,
):
    g = tl.arange(0, BLOCK_G)
    valid = g < num_segments
    start = tl.load(seg_indptr_ptr + g, mask=valid, other=0)
    length = tl.load(seg_indptr_ptr + g + 1, mask=valid, other=0) - start
    adapter = tl.load(seg_adapter_ptr + g, mask=valid, other=-1)
    has = (adapter >= 0) & (length > 0)
    tiles = tl.load(num_tiles_ptr + adapter, mask=has, other=0)
    entry = tl.load(entry_start_ptr + adapter, mask=has, other=0)
    blocks = (tiles + 1) // 2
    chunks = (length + BLOCK_T - 1) // BLOCK_T
    first_chunk = tl.cumsum(chunks, axis=0) - chunks
    # Items of few tokens, then those of several, then one for each chunk without an adapter.
    few = tl.where(length <= FEW, chunks * blocks, 0)
    several = tl.where(length > FEW, chunks * blocks, 0)
    bare = tl.where(blocks == 0, chunks, 0)
    num_few = tl.sum(few, axis=0)
    num_items = num_few + tl.sum(several, axis=0)
    first_item = tl.cumsum(few, axis=0) - few
    first_item = tl.where(length > FEW, num_few + tl.cumsum(several, axis=0) - several, first_item)
    first_item = tl.where(blocks == 0, num_items + tl.cumsum(bare, axis=0) - bare, first_item)
    first_row = tl.cumsum(length * blocks, axis=0) - length * blocks
    slots = tl.maximum(blocks, 1)
    most_slots = tl.max(slots, axis=0)
    for c in range(0, tl.max(chunks, axis=0)):
        here = c < chunks
        row = (start + c * BLOCK_T).to(tl.int64)
        count = tl.minimum(length - c * BLOCK_T, BLOCK_T).to(tl.int64)
        out_row = (first_row + c * BLOCK_T * blocks).to(tl.int64)
        record = chunks_ptr + (first_chunk + c).to(tl.int64) * 8
        tl.store(record, row, mask=here)
        tl.store(record + 1, count, mask=here)
        tl.store(record + 2, entry, mask=here)
        tl.store(record + 3, tiles.to(tl.int64), mask=here)
        tl.store(record + 4, blocks.to(tl.int64), mask=here)
        tl.store(record + 5, out_row, mask=here)
        tl.store(record + 6, start.to(tl.int64), mask=here)
        tl.store(record + 7, length.to(tl.int64), mask=here)
        tile = (row + TILE_T - 1) // TILE_T  # chunks are shorter: at most one begins in each
        begins = here & (tile * TILE_T < row + count)
        tl.store(tile_chunks_ptr + tile, first_chunk + c, mask=begins)
        for block in range(0, most_slots):
            item = first_item + c * slots + block
            fits = here & (block < slots) & (item < max_items)
            record = items_ptr + item.to(tl.int64) * 8
            tl.store(record, row, mask=fits)
            tl.store(record + 1, count, mask=fits)
            tl.store(record + 2, entry, mask=fits)
            tl.store(record + 3, tiles.to(tl.int64), mask=fits)
            tl.store(record + 4, (tiles * 0 + block).to(tl.int64), mask=fits)
            tl.store(record + 5, out_row + block * count, mask=fits)
    tl.store(counts_ptr, tl.sum(chunks, axis=0))
    tl.store(counts_ptr + 1, tl.minimum(num_items, max_items))
    tl.store(counts_ptr + 2, tl.minimum(num_items + tl.sum(bare, axis=0), max_items))
    tl.store(counts_ptr + 3, tl.minimum(num_few, max_items))


def fill_plan(plan: LoraPlan, lora: LoraBatch) -> None:
    """Write the work list of `lora` in one launch; the host waits for nothing.

    The plan must be large enough: for each request, its tokens times its rank blocks.
    """
    num_segments = lora.seg_adapter.shape[0]
    _plan_kernel[(1,)](
        seg_indptr_ptr=lora.seg_indptr,
        seg_adapter_ptr=lora.seg_adapter,
        entry_start_ptr=lora.table.entry_start,
        num_tiles_ptr=lora.table.num_tiles,
        chunks_ptr=plan.chunks,
        items_ptr=plan.items,
        counts_ptr=plan.counts,
        tile_chunks_ptr=plan.tile_chunks,
        num_segments=num_segments,
        max_items=plan.items.shape[0],
        FEW=FEW_TOKENS,
        BLOCK_T=plan.block_t,
        BLOCK_G=next_power_of_2(num_segments),
        TILE_T=TILE_T,
        num_warps=4,
    )


def make_plan(lora: LoraBatch, num_tokens: int, block_t: int) -> LoraPlan:
    """Make a plan and fill it."""
    max_blocks = ceil_div(lora.max_tiles, 2)
    plan = empty_plan(
        num_tokens, lora.seg_adapter.shape[0], max_blocks, block_t, lora.seg_adapter.device
    )
    fill_plan(plan, lora)
    return plan
