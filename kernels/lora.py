"""Many LoRA adapters of any rank in one batch: y += scale * (x A^T) B^T per token's own adapter.

Adapters lie in the page arena as tiles of up to 8 rank rows: an A tile is `[rows, in]`, a B tile
the same rows of B transposed, `[rows, out]`. An adapter is a list of tiles, each with its own
scale, so a weighted blend of adapters is the concatenation of their lists: exact, and nothing is
copied. There is no largest rank and no padding.

The step's tokens are sorted so that each adapter's are adjacent: a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

TILE_ROWS = 8


class Projection(IntEnum):
    """The seven linear maps of a layer that an adapter may change, in the table's order."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741
    GATE = 4
    UP = 5
    DOWN = 6


NUM_PROJECTIONS = len(Projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTable:
    """Where every virtual adapter's tiles are.

    The entry of (virtual adapter v, layer l, projection p, tile t) is
    `entry_start[v] + (l * 7 + p) * num_tiles[v] + t`. All tensors are on the arena's device.

    entry_start  [A] int64
    num_tiles    [A] int32   tiles of the adapter's largest projection
    a_offset     [N] int64   element offset of the A tile in the flat arena; -1: no tile
    b_offset     [N] int64   likewise of the B tile
    rows         [N] int32   rank rows in the tile, 1 to 8
    scale        [N] fp32    multiplies A's output
    """

    entry_start: torch.Tensor
    num_tiles: torch.Tensor
    a_offset: torch.Tensor
    b_offset: torch.Tensor
    rows: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBatch:
    """Which virtual adapter each segment of the step's tokens uses.

    seg_indptr   [G + 1] int32  segment g is rows seg_indptr[g]:seg_indptr[g + 1]
    seg_adapter  [G] int32      index into the table; -1: base only
    max_tiles                   most tiles of any adapter in the step; 0: no row has an adapter
    """

    table: LoraTable
    seg_indptr: torch.Tensor
    seg_adapter: torch.Tensor
    max_tiles: int


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


def lora_shrink(
    x: torch.Tensor,
    arena: torch.Tensor,
    lora: LoraBatch,
    layer: int,
    projections: tuple[int, ...],
) -> torch.Tensor:
    """Project each token into its adapter's rank space, scaled; shapes as in `lora_shrink_ref`."""
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
    lora_expand_ref(h, arena, lora, layer, projections, y, out_offsets)
