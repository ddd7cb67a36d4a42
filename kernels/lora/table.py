"""LoraTable and LoraBatch: the location of adapters in memory, and the adapter of each token.

Adapters lie in the page arena as tiles of up to 8 rank rows: an A tile is `[rows, in]`, a B tile
is the same rows of B transposed, `[rows, out]`. An adapter is a list of tiles, each with its own
scale. So a weighted blend of adapters is the concatenation of their lists: exact, and without
copies. Any rank works, without padding.

The step's tokens are sorted so that each adapter's are adjacent: a segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

TILE_ROWS = 8


class Projection(IntEnum):
    """The linear maps of a layer that an adapter may change, in the table's order.

    A gated delta net has q, k and v in the place of Q, its gate in K's, its rates in V's, and its
    decays in the last, which no other layer has.
    """

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741
    GATE = 4
    UP = 5
    DOWN = 6
    DECAY = 7


NUM_PROJECTIONS = len(Projection)
#: A layer's matrices, and the projections that lie in each side by side.
FUSED = {
    "qkv": (Projection.Q, Projection.K, Projection.V, Projection.DECAY),
    "o": (Projection.O,),
    "gate_up": (Projection.GATE, Projection.UP),
    "down": (Projection.DOWN,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTable:
    """The location of every virtual adapter's tiles.

    The entry of (virtual adapter v, layer l, projection p, tile t) is
    `entry_start[v] + (l * 8 + p) * num_tiles[v] + t`. All tensors are on the arena's device. If v
    changes routed experts, expert x of layer l is its layer L + l * X + x.

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
class AdjustTable:
    """The location of the vectors that an adapter applies to the base's product.

    A part of virtual adapter v adds weight * (gain * (W x + b) + shift) to W x + b: gain is DoRA's
    factor minus one, shift a bias. The entry of (v, layer l, projection p, part i) is
    `part_start[v] + (l * 8 + p) * num_parts[v] + i`. All tensors are on the arena's device.

    part_start    [A] int64
    num_parts     [A] int32  0: the adapter has no such vectors
    gain_offset   [N] int64  element offset of the gain [out] in the flat arena; -1: none
    shift_offset  [N] int64  likewise of the shift; on a GPU both are multiples of 8
    weight        [N] fp32
    """

    part_start: torch.Tensor
    num_parts: torch.Tensor
    gain_offset: torch.Tensor
    shift_offset: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A matrix `[rows, width]` in the arena, cut into blocks of `block_rows` rows.

    offsets  [ceil(rows / block_rows)] int64: where each block begins in the flat arena
    """

    rows: int
    width: int
    block_rows: int
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabPart:
    """The LoRA of one part of a virtual adapter at the embedding or the LM head.

    It adds weight * (gain * y + shift + scale * B A x) to y.

    a, b    the one as wide as the vocabulary has a row per token, the other a row per rank:
            embedding a [V, R], b [R, E]; LM head a [R, E], b [V, R]
    gain    [out, 1], as in AdjustTable; None: none
    shift   likewise
    """

    weight: float
    scale: float
    a: Blocks
    b: Blocks
    gain: Blocks | None
    shift: Blocks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows of the embedding or the LM head that one part of a virtual adapter replaces.

    It adds weight * (new - base) to the base's results for those rows.

    token_ids  [rows] int64 the rows' tokens, none twice; None: all tokens, in order
    blocks     [rows, E]
    """

    weight: float
    token_ids: npt.NDArray[np.int64] | None
    blocks: Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """The new rows of the embedding, or of the LM head, of virtual adapters that replace few.

    Virtual adapter v has tokens first[v]:first[v] + count[v]. Token i has the rows at entries
    part_start[i]:part_start[i] + num_parts[i], one for each part of a blend that replaces it, in
    proportion to the part's weight. All tensors are on the arena's device.

    first       [A] int32
    count       [A] int32  0: the adapter has no such rows
    token_id    [M] int32  no token twice in one adapter
    part_start  [M] int32
    num_parts   [M] int32
    offset      [N] int64  element offset of the row [E] in the flat arena; multiples of 8 on a GPU
    weight      [N] fp32
    """

    first: torch.Tensor
    count: torch.Tensor
    token_id: torch.Tensor
    part_start: torch.Tensor
    num_parts: torch.Tensor
    offset: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraSegment:
    """A segment of the step whose virtual adapter has more than tiles.

    start, end    its tokens, as rows of the step
    first, last   its sampling tokens, as rows of the logits; `last` is excluded
    adapter       index into the table
    new_embedding, new_head   rows that replace the base's, if no RowTable has them
    """

    start: int
    end: int
    first: int
    last: int
    adapter: int
    embedding: tuple[VocabPart, ...]
    head: tuple[VocabPart, ...]
    new_embedding: tuple[NewRows, ...] = ()
    new_head: tuple[NewRows, ...] = ()

    @property
    def is_wide(self) -> bool:
        """Return whether it has anything that the kernels' tables do not have."""
        return bool(self.embedding or self.head or self.new_embedding or self.new_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraExtras:
    """The parts of a step's adapters that are not tiles.

    row_adapter  [T] int32  the adapter whose vectors adjust this row; -1: none
    adjust       None: no adapter of the step has such vectors
    embedding_rows, head_rows   None: no adapter of the step has such rows
    """

    segments: tuple[ExtraSegment, ...]
    row_adapter: torch.Tensor
    adjust: AdjustTable | None
    embedding_rows: RowTable | None = None
    head_rows: RowTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBatch:
    """The virtual adapter of each segment of the step's tokens.

    seg_indptr   [G + 1] int32  segment g is rows seg_indptr[g]:seg_indptr[g + 1]
    seg_adapter  [G] int32      index into the table; -1: base only
    max_tiles                   most tiles of any adapter in the step; 0: no row has an adapter
    extras                      None: no adapter of the step has more than tiles
    has_experts                 whether each adapter of the table changes routed experts
    """

    table: LoraTable
    seg_indptr: torch.Tensor
    seg_adapter: torch.Tensor
    max_tiles: int
    extras: LoraExtras | None = None
    has_experts: tuple[bool, ...] = ()
