"""Many LoRA adapters of any rank in one batch: y += scale * (x A^T) B^T per token's own adapter.

The shrink is x A^T, the expand the product with B^T. On a GPU the vectors between the two are the
rows of lora_plan.py, on a CPU a dense `[projections, T, 8 * max_tiles]`; to the caller they are
opaque.
"""

from __future__ import annotations

import itertools

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.lora_plan import RANK_BLOCK, LoraPlan, make_plan
from kernels.lora_table import NUM_PROJECTIONS, TILE_ROWS, LoraBatch, LoraTable


def lora_shrink_ref(
    x: torch.Tensor,
    arena: torch.Tensor,
    lora: LoraBatch,
    layer: int,
    projections: tuple[int, ...],
) -> torch.Tensor:
    """Project each token into its adapter's rank space, scaled.

    x      [T, in]
    arena  any shape, read as flat
    -> [len(projections), T, 8 * max_tiles] fp32; tile t's rows begin at column 8 t, and what no
       rank row fills is zero
    Source: Punica, arXiv:2310.18547 (the shrink half of SGMV).
    """
    flat, table = arena.view(-1), lora.table
    width = TILE_ROWS * lora.max_tiles
    h = torch.zeros(len(projections), x.shape[0], width, device=x.device)
    in_width = x.shape[1]
    for start, end, entries in _tiles_of_segments(lora, layer, projections):
        for i, tile, entry in entries:
            rows, offset = int(table.rows[entry]), int(table.a_offset[entry])
            a = flat[offset : offset + rows * in_width].view(rows, in_width)
            column = TILE_ROWS * tile
            product = x[start:end].float() @ a.float().T
            h[i, start:end, column : column + rows] = product * table.scale[entry]
    return h


def lora_expand_ref(
    h: torch.Tensor,
    arena: torch.Tensor,
    lora: LoraBatch,
    layer: int,
    projections: tuple[int, ...],
    y: torch.Tensor,
    out_offsets: tuple[int, ...],
) -> None:
    """Add each token's rank-space vector times its adapter's B^T to `y`, in place.

    h            [len(projections), T, 8 * max_tiles] fp32, from lora_shrink
    y            [T, sum of out widths]
    out_offsets  len(projections) + 1 column bounds: projection i writes
                 y[:, out_offsets[i]:out_offsets[i + 1]]
    Source: Punica, arXiv:2310.18547 (the expand half of SGMV).
    """
    flat, table = arena.view(-1), lora.table
    total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
    for start, end, entries in _tiles_of_segments(lora, layer, projections):
        for i, tile, entry in entries:
            rows, offset = int(table.rows[entry]), int(table.b_offset[entry])
            low, high = out_offsets[i], out_offsets[i + 1]
            b = flat[offset : offset + rows * (high - low)].view(rows, high - low)
            column = TILE_ROWS * tile
            total[start:end, low:high] += h[i, start:end, column : column + rows] @ b.float()
    y += total.to(y.dtype)


def _tiles_of_segments(
    lora: LoraBatch, layer: int, projections: tuple[int, ...]
) -> list[tuple[int, int, list[tuple[int, int, int]]]]:
    """(first row, end row, [(index in projections, tile, entry)]) of every segment with tiles."""
    table = lora.table
    bounds = lora.seg_indptr.tolist()
    segments = []
    for g, adapter in enumerate(lora.seg_adapter.tolist()):
        if adapter < 0 or bounds[g] == bounds[g + 1]:
            continue
        num_tiles = int(table.num_tiles[adapter])
        entries = []
        for i, projection in enumerate(projections):
            first = int(table.entry_start[adapter]) + (
                (layer * NUM_PROJECTIONS + projection) * num_tiles
            )
            offsets = table.a_offset[first : first + num_tiles].tolist()
            entries += [(i, t, first + t) for t, offset in enumerate(offsets) if offset >= 0]
        segments.append((bounds[g], bounds[g + 1], entries))
    return segments


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


@jit()
def tile_rows(entry, tile, tiles, b_offset_ptr, rows_ptr, width):
    """Where 16 rank rows of B begin in the arena, and which of them there are.

    tile  [16], the tile of each row, two tiles one after the other
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
    """A chunk's adapter output for some columns of one projection: [BLOCK_T, BLOCK_N] fp32."""
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, 16)
    entry = first_entry + (layer * 7 + projection) * tiles
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
        )
        product = tl.dot(h, b, product, input_precision="ieee")
    return product


@jit()
def lora_row(
    row,
    row_step,
    first_entry,
    tiles,
    blocks,
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    layer,
    columns,
    width,
    projection,
    NUM_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token's adapter output for some columns of one projection: [BLOCK_N] fp32.

    A thread holds 16 rank rows of its columns, so nothing is exchanged: many loads in flight and
    no barrier, where a product on tensor cores would spend 15 of its 16 rows on nobody.
    """
    r = tl.arange(0, 16)
    entry = first_entry + (layer * 7 + projection) * tiles
    product = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for block in range(0, blocks):
        start, has = tile_rows(entry, block * 2 + r // 8, tiles, b_offset_ptr, rows_ptr, width)
        h = tl.load(h_ptr + (row + block * row_step) * (NUM_P * 16) + r)
        b = tl.load(
            (arena_ptr + start)[:, None] + columns[None, :],
            mask=has[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        product += tl.sum(h.to(tl.float32)[:, None] * b.to(tl.float32), axis=0)
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
    FEW: tl.constexpr,
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
    # As in the shrink, the first record is not loaded after the count but beside it.
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
        if count <= FEW:
            columns = (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = low + columns < high
            for token in range(0, count):
                row = lora_row(
                    h_row + token,
                    count,
                    first_entry,
                    tiles,
                    blocks,
                    h_ptr + index * 16,
                    arena_ptr,
                    b_offset_ptr,
                    rows_ptr,
                    layer,
                    columns,
                    high - low,
                    projection,
                    NUM_P,
                    BLOCK_N,
                )
                y_row = y_ptr + (first_row + token) * y_stride + low + columns
                if ADD:
                    row += tl.load(y_row, mask=inside, other=0.0).to(tl.float32)
                tl.store(y_row, row.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            # In narrower parts, whose registers are no more than the other path's.
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
                if ADD:
                    product += tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
                tl.store(y_ptrs, product.to(y_ptr.dtype.element_ty), mask=mask)
        unit += tl.num_programs(0)
        if unit < num_units:
            record = chunks_ptr + (unit // num_blocks).to(tl.int64) * 8
            first_row, count, first_entry, tiles, blocks, h_row = load_record(record)


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
    block_n: int = 0,
    few: int = 2,
    dot_n: int = 256,
    num_warps: int = 0,
    num_stages: int = 1,
) -> None:
    """Add to y, or with add=False write to it, zeros for base-only tokens included."""
    widths = [high - low for low, high in itertools.pairwise(out_offsets)]
    # A warp per 256 columns: then a thread's columns are its own (see lora_row).
    block_n = block_n or (256 if plan.block_t <= RANK_BLOCK else 512)
    block_n = min(block_n, max(16, next_power_of_2(max(widths))))
    num_blocks = sum(ceil_div(width, block_n) for width in widths)
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    bounds = (*out_offsets, 0, 0)[:4]
    _expand_kernel[(min(num_programs, plan.chunks.shape[0] * num_blocks),)](
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
        FEW=few,
        BLOCK_T=plan.block_t,
        BLOCK_N=block_n,
        DOT_N=min(block_n, dot_n),
        num_warps=num_warps or max(1, min(4, block_n // 256)),
        num_stages=num_stages,
    )


def block_of(num_tokens: int, num_segments: int) -> int:
    """Tokens per chunk: 16 where segments are short (decode), 32 where they are long.

    At 64 the products take another, here slower, path of the tensor cores.
    """
    return 32 if num_tokens >= max(512, 24 * num_segments) else 16


def lora_shrink(
    x: torch.Tensor,
    arena: torch.Tensor,
    lora: LoraBatch,
    layer: int,
    projections: tuple[int, ...],
) -> torch.Tensor:
    """Project each token into its adapter's rank space, scaled; pass the result to lora_expand."""
    if use_triton(x):
        plan = make_plan(lora, x.shape[0], block_of(x.shape[0], lora.seg_adapter.shape[0]))
        return lora_shrink_triton(x, arena, lora.table, plan, layer, projections)
    return lora_shrink_ref(x, arena, lora, layer, projections)


def lora_expand(
    h: torch.Tensor,
    arena: torch.Tensor,
    lora: LoraBatch,
    layer: int,
    projections: tuple[int, ...],
    y: torch.Tensor,
    out_offsets: tuple[int, ...],
) -> None:
    """Add each token's adapter output to `y` in place; shapes as in `lora_expand_ref`."""
    if use_triton(y):
        plan = make_plan(lora, y.shape[0], block_of(y.shape[0], lora.seg_adapter.shape[0]))
        lora_expand_triton(h, arena, lora.table, plan, layer, projections, y, out_offsets)
    else:
        lora_expand_ref(h, arena, lora, layer, projections, y, out_offsets)
