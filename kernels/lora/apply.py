"""Many LoRA adapters of any rank in one batch: y += scale * (x A^T) B^T, with each token's adapter.

The *shrink* is x A^T, the *expand* is the product with B^T. On a GPU the vectors between the two
are rows as in plan.py, on a CPU a dense `[projections, T, 8 * max_tiles]`; the caller only
passes them on.
"""

from __future__ import annotations

import torch

from kernels.backend import use_triton
from kernels.lora.expand import lora_expand_triton
from kernels.lora.plan import make_plan
from kernels.lora.shrink import lora_shrink_triton
from kernels.lora.table import NUM_PROJECTIONS, TILE_ROWS, LoraBatch


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
    -> [len(projections), T, 8 * max_tiles] fp32; tile t's rows begin at column 8 t, and columns
       without a rank row are zero
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
    """Return (first row, end row, [(index in projections, tile, entry)]) of segments with tiles."""
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


def block_of(num_tokens: int, num_segments: int) -> int:
    """Return the tokens per chunk: 16 if segments are short (decode), 32 if they are long.

    At 64 the compiler uses other tensor core instructions, which are slower here.
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
