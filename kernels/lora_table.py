"""How adapters lie in memory, and which of them each token of a step uses.

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
    b_offset     [N] int64   likewise of the B tile; on a GPU both are multiples of 8
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
