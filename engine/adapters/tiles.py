"""TileMap: the location of each part of an adapter in its pages (docs/memory.md).

`place_tiles` decides from shapes alone; `fill_tiles` writes the tensors into pages in host memory,
the *packed adapter*, which is then copied page by page into the arena. Offsets are those of the
packed adapter until `TileMap.at` turns them into offsets of the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.adapters.base_weights import BaseWeights
from engine.adapters.fp8_tiles import fp8_parts
from engine.adapters.host_values import write_rows
from engine.adapters.pages import SUB_PAGES
from engine.adapters.plan import EMBEDDING, AdapterPlan, Site, Target
from engine.adapters.rows import Replacement
from engine.adapters.values import (
    AppliedValues,
    applied_values,
    check_copies,
    finite,
    replaced_rows,
)
from engine.model.config import ModelConfig
from kernels import NUM_PROJECTIONS, TILE_ROWS, Blocks, PageLayout
from kernels.fp8 import FP8

Int64s = npt.NDArray[np.int64]

# Largest number of pieces that did not fit at a page's end and wait for the next page. More would
# fill little more and cost time.
_MAX_WAITING = 64
# Every piece begins at a multiple of 8 elements, as the GPU kernels require.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabMap:
    """The location of an adapter's LoRA of the embedding or the LM head (`kernels.VocabPart`).

    Offsets are those of the packed adapter or of the arena, as in the TileMap that this is part of.
    """

    scale: float
    a: Blocks
    b: Blocks
    gain: Blocks | None
    shift: Blocks | None

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """Return all blocks."""
        found = (self.a, self.b, self.gain, self.shift)
        return tuple(blocks for blocks in found if blocks is not None)

    def moved(self, move: Callable[[Int64s], Int64s]) -> VocabMap:
        def moved(blocks: Blocks | None) -> Blocks | None:
            return None if blocks is None else replace(blocks, offsets=move(blocks.offsets))

        return VocabMap(
            scale=self.scale,
            a=replace(self.a, offsets=move(self.a.offsets)),
            b=replace(self.b, offsets=move(self.b.offsets)),
            gain=moved(self.gain),
            shift=moved(self.shift),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """The location of rows that replace the base's, see `kernels.NewRows`; offsets as in VocabMap.

    token_ids  [tokens] the rows' tokens, none twice; None: all tokens
    """

    token_ids: Int64s | None
    blocks: Blocks

    def moved(self, move: Callable[[Int64s], Int64s]) -> RowMap:
        return replace(self, blocks=replace(self.blocks, offsets=move(self.blocks.offsets)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMap:
    """The location of a draft head's down [R, E] and up [E, R]; offsets as in VocabMap."""

    down: Blocks
    up: Blocks

    def moved(self, move: Callable[[Int64s], Int64s]) -> HeadMap:
        return HeadMap(
            down=replace(self.down, offsets=move(self.down.offsets)),
            up=replace(self.up, offsets=move(self.up.offsets)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """Entries `[L * 8, num_tiles]` as in `kernels.LoraTable`, of one adapter.

    Offsets count elements; -1: no tile. Of routed experts there are L * X layers more, those of
    each layer one after another.

    num_experts     X; 0: it changes none

    per_element     numbers of a tile in an element; more than 1: tiles are in E4M3
    num_parts       matrices in E4M3 whose sum each A and each B is, see `fp8_tiles`; with two there
                    are four tiles where there was one, as each part of A goes with each of B
    tail_sub_pages  filled sub-pages of the last page; 0: the whole page is needed
    gain_offset     [L * 8] of DoRA's row factors minus one; None: no projection has one
    shift_offset    [L * 8] of vectors to add; None: no projection has one
    embedding, head  None: the adapter has no LoRA there
    new_embedding, new_head  None: it replaces no rows there
    draft_heads     in their order; none where they are not used
    classifier      the head [labels, E] of one that classifies
    """

    num_pages: int
    tail_sub_pages: int
    num_tiles: int
    a_offset: Int64s
    b_offset: Int64s
    rows: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    num_experts: int = 0
    per_element: int = 1
    num_parts: int = 1
    gain_offset: Int64s | None = None
    shift_offset: Int64s | None = None
    embedding: VocabMap | None = None
    head: VocabMap | None = None
    new_embedding: RowMap | None = None
    new_head: RowMap | None = None
    draft_heads: tuple[HeadMap, ...] = ()
    classifier: Blocks | None = None

    @property
    def num_layers(self) -> int:
        return len(self.rows) // NUM_PROJECTIONS // (1 + self.num_experts)

    def entry(self, site: Site) -> int:
        """Return the row of a projection's entries."""
        return entry_of(site, self.num_layers, self.num_experts)

    @property
    def replaces(self) -> bool:
        """Return whether it has rows of its own for the embedding or the last matrix."""
        return self.new_embedding is not None or self.new_head is not None

    @property
    def adjusts(self) -> bool:
        """Return whether a projection has a gain or a shift."""
        return self.gain_offset is not None or self.shift_offset is not None

    @property
    def has_extras(self) -> bool:
        """Return whether there is more than tiles."""
        changes_ends = self.embedding is not None or self.head is not None
        return self.adjusts or changes_ends or self.replaces

    def layer_ends(self, page_elems: int) -> list[int]:
        """Return for each layer how many of the first pages it and the layers before it need.

        The embedding counts to the first layer; the last layer needs all pages. Call it on the map
        of a packed adapter, not of the arena.
        """
        vectors = (self.gain_offset, self.shift_offset)
        offsets = (self.a_offset, self.b_offset, *(each for each in vectors if each is not None))
        num_layers = self.num_layers
        last = np.full(num_layers, -1, np.int64)
        end = num_layers * NUM_PROJECTIONS
        for part in (part for each in offsets for part in (each[:end], each[end:])):
            if part.size:
                last = np.maximum(last, part.reshape(num_layers, -1).max(1))
        if self.embedding is not None:
            ends_at = (blocks.offsets.max() for blocks in self.embedding.blocks)
            last[0] = max(last[0], *ends_at)
        if self.new_embedding is not None:
            last[0] = max(last[0], self.new_embedding.blocks.offsets.max())
        pages = np.maximum.accumulate(last // page_elems + 1)
        pages[-1] = self.num_pages
        ends: list[int] = pages.tolist()
        return ends

    def at(self, pages: list[int], page_elems: int, tail: Sequence[int] = ()) -> TileMap:
        """Return the map with offsets of the arena: page i of the packed adapter is `pages[i]`.

        tail  where the sub-pages of the page after those lie, see `engine.adapters.pages.Place`
        """
        unit, places = page_elems, np.asarray(pages, dtype=np.int64)
        if tail:
            unit = page_elems // SUB_PAGES
            whole = (places[:, None] * SUB_PAGES + np.arange(SUB_PAGES)).ravel()
            places = np.concatenate((whole, np.asarray(tail, dtype=np.int64)))
        base = places * unit

        def move(offset: Int64s) -> Int64s:
            moved = base[offset // unit] + offset % unit
            return np.where(offset < 0, offset, moved)

        return replace(
            self,
            a_offset=move(self.a_offset),
            b_offset=move(self.b_offset),
            gain_offset=None if self.gain_offset is None else move(self.gain_offset),
            shift_offset=None if self.shift_offset is None else move(self.shift_offset),
            embedding=None if self.embedding is None else self.embedding.moved(move),
            head=None if self.head is None else self.head.moved(move),
            new_embedding=None if self.new_embedding is None else self.new_embedding.moved(move),
            new_head=None if self.new_head is None else self.new_head.moved(move),
            draft_heads=tuple(head.moved(move) for head in self.draft_heads),
            classifier=self.classifier
            and replace(self.classifier, offsets=move(self.classifier.offsets)),
        )


def entry_of(site: Site, num_layers: int, num_experts: int) -> int:
    """Return the row of a projection's entries in a TileMap."""
    layer = site.layer
    if site.expert is not None:
        layer = num_layers + site.layer * num_experts + site.expert
    return layer * NUM_PROJECTIONS + site.projection


_Piece = tuple[int, Int64s, int]  # (size, array of offsets, the piece's index in it)


def _fill(pieces: list[_Piece], start: int, num_elems: int) -> tuple[list[_Piece], list[_Piece]]:
    """Lay pieces side by side from `start`; return (those that fit, the others)."""
    used = 0
    placed: list[_Piece] = []
    waiting: list[_Piece] = []
    for i, piece in enumerate(pieces):
        size, offsets, index = piece
        if used + size <= num_elems:
            offsets[index] = start + used
            used += size
            placed.append(piece)
        else:
            waiting.append(piece)
        if used == num_elems or len(waiting) > _MAX_WAITING:
            return placed, waiting + pieces[i + 1 :]
    return placed, waiting


class _Packer:
    """Lays pieces into pages in their order; no piece crosses a page's end.

    A piece that does not fit into the current page waits for the next one, and smaller pieces that
    come after it fill the page. So no piece lies in a later page than without this.
    """

    def __init__(self, page_elems: int) -> None:
        self._page_elems = page_elems
        self._pieces: list[_Piece] = []

    def add(self, num_elems: int, offsets: Int64s, index: int) -> None:
        """Add a piece; `pack` writes its place to `offsets[index]`."""
        size = -(-num_elems // _ALIGNMENT) * _ALIGNMENT
        assert size <= self._page_elems
        self._pieces.append((size, offsets, index))

    def pack(self) -> tuple[int, int]:
        """Write every offset; return (number of pages, filled sub-pages of the last one).

        0 sub-pages: the last page is needed whole.
        """
        waiting, num_pages = self._pieces, 0
        last: list[_Piece] = []
        while waiting:
            start = num_pages * self._page_elems
            last, waiting = _fill(waiting, start, self._page_elems)
            num_pages += 1
        return num_pages, self._pack_sub_pages(last, (num_pages - 1) * self._page_elems)

    def _pack_sub_pages(self, pieces: list[_Piece], start: int) -> int:
        """Lay the last page's pieces into sub-pages, none across two, if fewer than all suffice."""
        sub_page_elems, rest = divmod(self._page_elems, SUB_PAGES)
        if (
            rest
            or sub_page_elems % _ALIGNMENT
            or any(size > sub_page_elems for size, _, _ in pieces)
        ):
            return 0
        before = [int(offsets[index]) for _, offsets, index in pieces]
        waiting = pieces
        for sub_page in range(SUB_PAGES - 1):
            _, waiting = _fill(waiting, start + sub_page * sub_page_elems, sub_page_elems)
            if not waiting:
                return sub_page + 1
        for (_, offsets, index), offset in zip(pieces, before, strict=True):
            offsets[index] = offset
        return 0

    def blocks(self, rows: int, width: int) -> Blocks:
        """Cut a matrix into blocks of as many rows as a page holds, and add them."""
        block_rows = min(rows, self._page_elems // width)
        offsets = np.zeros(-(-rows // block_rows), np.int64)
        for i in range(len(offsets)):
            self.add(min(block_rows, rows - i * block_rows) * width, offsets, i)
        return Blocks(rows=rows, width=width, block_rows=block_rows, offsets=offsets)


def place_tiles(
    plan: AdapterPlan,
    model: ModelConfig,
    layout: PageLayout,
    *,
    has_draft_heads: bool = False,
    is_original: bool = False,
) -> TileMap:
    """Decide where everything lies: the embedding first, then the layers in order, then the head.

    has_draft_heads  whether there is room for the draft heads, too: they lie last
    is_original      whether tiles in E4M3 lose nothing, see `fp8_tiles`

    A projection's tiles are adjacent, so that they can be read as one matrix, except at a page's
    end. If a page holds fewer than 8 of the widest rows, tiles have fewer rows.
    """
    tile_rows = min(TILE_ROWS, layout.page_elems // model.widest)
    num_tiles = max((-(-target.rank // tile_rows) for target in plan.targets), default=1)
    num_entries = model.num_layers * NUM_PROJECTIONS
    num_parts = 1 + (is_original and layout.tile_per_element > 1)
    shape = num_entries * (1 + plan.num_experts), num_parts, num_tiles
    rows, scale = np.zeros(shape[::2], np.int32), np.zeros(shape[::2], np.float32)
    a_offset, b_offset = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    gain, shift = np.full((2, num_entries), -1, np.int64)
    packer = _Packer(layout.page_elems)
    embedding = _place_vocab(packer, plan.embedding, model)
    new_embedding = _place_rows(packer, plan.new_embedding, model)
    for target in plan.targets:
        entry = entry_of(target.site, model.num_layers, plan.num_experts)
        counts = [min(tile_rows, target.rank - first) for first in range(0, target.rank, tile_rows)]
        rows[entry, : len(counts)] = counts
        scale[entry, : len(counts)] = target.scaling
        in_width, out_width = target.site.widths(model)
        for offsets, width in ((a_offset, in_width), (b_offset, out_width)):
            for part in offsets[entry]:
                for i, count in enumerate(counts):
                    packer.add(-(-count * width // layout.tile_per_element), part, i)
        for own, has in ((gain, target.magnitude is not None), (shift, target.has_shift(model))):
            if has:
                packer.add(out_width, own, entry)
    head = _place_vocab(packer, plan.head, model)
    new_head = _place_new_head(packer, plan, model, new_embedding)
    draft_heads = _place_heads(packer, plan, model) if has_draft_heads else ()
    classifier = _place_classifier(packer, plan, model)
    num_pages, tail_sub_pages = packer.pack()
    return TileMap(
        num_pages=num_pages,
        tail_sub_pages=tail_sub_pages,
        **_in_pairs(a_offset, b_offset, rows, scale),
        num_experts=plan.num_experts,
        per_element=layout.tile_per_element,
        gain_offset=gain if (gain >= 0).any() else None,
        shift_offset=shift if (shift >= 0).any() else None,
        embedding=embedding,
        head=head,
        new_embedding=new_embedding,
        new_head=new_head,
        draft_heads=draft_heads,
        classifier=classifier,
    )


def _in_pairs(
    a_offset: Int64s,
    b_offset: Int64s,
    rows: npt.NDArray[np.int32],
    scale: npt.NDArray[np.float32],
) -> dict[str, Any]:
    """Return a TileMap's entries: each part of A with each part of B.

    a_offset, b_offset  [L * 8, parts, tiles]
    rows, scale         [L * 8, tiles]
    """
    num_entries, num_parts, num_tiles = a_offset.shape
    return {
        "num_parts": num_parts,
        "num_tiles": num_tiles * num_parts**2,
        "a_offset": np.repeat(a_offset, num_parts, axis=1).reshape(num_entries, -1),
        "b_offset": np.tile(b_offset, (1, num_parts, 1)).reshape(num_entries, -1),
        "rows": np.tile(rows, num_parts**2),
        "scale": np.tile(scale, num_parts**2),
    }


def _place_heads(packer: _Packer, plan: AdapterPlan, model: ModelConfig) -> tuple[HeadMap, ...]:
    hidden = model.hidden_size
    return tuple(
        HeadMap(down=packer.blocks(head.rank, hidden), up=packer.blocks(hidden, head.rank))
        for head in plan.draft_heads
    )


def _place_classifier(packer: _Packer, plan: AdapterPlan, model: ModelConfig) -> Blocks | None:
    if plan.classifier is None:
        return None
    return packer.blocks(plan.classifier.num_labels, model.hidden_size)


def _place_rows(
    packer: _Packer, replacement: Replacement | None, model: ModelConfig
) -> RowMap | None:
    if replacement is None:
        return None
    if replacement.token_ids is None:
        return RowMap(token_ids=None, blocks=packer.blocks(model.vocab_size, model.hidden_size))
    token_ids = np.array(replacement.token_ids, np.int64)
    return RowMap(token_ids=token_ids, blocks=packer.blocks(len(token_ids), model.hidden_size))


def _place_new_head(
    packer: _Packer, plan: AdapterPlan, model: ModelConfig, embedding: RowMap | None
) -> RowMap | None:
    """Place the last matrix's rows, unless they are those of the embedding."""
    is_shared = plan.new_head == plan.new_embedding
    return embedding if is_shared else _place_rows(packer, plan.new_head, model)


def _place_vocab(packer: _Packer, target: Target | None, model: ModelConfig) -> VocabMap | None:
    if target is None:
        return None
    _, out_width = target.site.widths(model)
    vocab, hidden, rank = model.vocab_size, model.hidden_size, target.rank
    is_embedding = target.projection == EMBEDDING
    return VocabMap(
        scale=target.scaling,
        a=packer.blocks(vocab, rank) if is_embedding else packer.blocks(rank, hidden),
        b=packer.blocks(rank, hidden) if is_embedding else packer.blocks(vocab, rank),
        gain=None if target.magnitude is None else packer.blocks(out_width, 1),
        shift=packer.blocks(out_width, 1) if target.has_shift(model) else None,
    )


def fill_tiles(
    packed: torch.Tensor,
    plan: AdapterPlan,
    tiles: TileMap,
    tensor: Callable[[str], torch.Tensor],
    base: BaseWeights,
) -> None:
    """Write the adapter's tensors into `packed` [num_pages, page_elems] as `tiles` says.

    tensor  gives a tensor of the file by name
    base    the base's weights, on which DoRA's factors depend

    Where tiles are in E4M3, each part of a matrix gets a scale, by which `tiles.scale` is
    multiplied.
    Raises AdapterMismatch naming a tensor whose values are wrong.
    """
    check_copies(plan, tensor, base)
    flat = packed.view(-1)
    in_tiles = flat.view(FP8) if tiles.per_element > 1 else flat
    for target in plan.targets:
        values = applied_values(target, tensor, base)
        entry = tiles.entry(target.site)
        _fill_matrices(in_tiles, tiles, entry, values)
        for vector, vectors in (
            (values.gain, tiles.gain_offset),
            (values.shift, tiles.shift_offset),
        ):
            if vector is not None and vectors is not None:
                write_rows(flat, [int(vectors[entry])], [1], vector[None])
    for end, places in ((plan.embedding, tiles.embedding), (plan.head, tiles.head)):
        if end is not None and places is not None:
            _fill_vocab(flat, end, places, applied_values(end, tensor, base))
    if plan.new_embedding is not None and tiles.new_embedding is not None:
        _write_blocks(flat, tiles.new_embedding.blocks, replaced_rows(plan.new_embedding, tensor))
    is_shared = plan.new_head == plan.new_embedding
    if plan.new_head is not None and tiles.new_head is not None and not is_shared:
        _write_blocks(flat, tiles.new_head.blocks, replaced_rows(plan.new_head, tensor))
    for head, room in zip(plan.draft_heads, tiles.draft_heads, strict=False):
        for name, blocks in ((head.down, room.down), (head.up, room.up)):
            _write_blocks(flat, blocks, finite(name, tensor(name)))
    if plan.classifier is not None and tiles.classifier is not None:
        name = plan.classifier.name
        _write_blocks(flat, tiles.classifier, finite(name, tensor(name)))


def _fill_matrices(
    in_tiles: torch.Tensor, tiles: TileMap, entry: int, values: AppliedValues
) -> None:
    by_part = tiles.num_parts, tiles.num_parts, -1  # A's part, B's part, tile
    rows = tiles.rows[entry].reshape(by_part)[0, 0].tolist()
    scales = tiles.scale[entry].reshape(by_part)
    for matrix, offsets, axis in (
        (values.a, tiles.a_offset[entry].reshape(by_part)[:, 0], 0),
        (values.b.T, tiles.b_offset[entry].reshape(by_part)[0], 1),
    ):
        parts = [(matrix, 1.0)]
        if tiles.per_element > 1:
            parts = fp8_parts(matrix, tiles.num_parts)
        for i, (part, scale) in enumerate(parts):
            np.moveaxis(scales, axis, 0)[i] *= scale
            write_rows(in_tiles, (offsets[i] * tiles.per_element).tolist(), rows, part)


def _fill_vocab(
    flat: torch.Tensor, target: Target, places: VocabMap, values: AppliedValues
) -> None:
    is_embedding = target.projection == EMBEDDING
    _write_blocks(flat, places.a, values.a.T if is_embedding else values.a)
    _write_blocks(flat, places.b, values.b.T if is_embedding else values.b)
    for vector, blocks in ((values.gain, places.gain), (values.shift, places.shift)):
        if vector is not None and blocks is not None:
            _write_blocks(flat, blocks, vector[:, None])


def _write_blocks(flat: torch.Tensor, blocks: Blocks, matrix: torch.Tensor) -> None:
    starts = range(0, blocks.rows, blocks.block_rows)
    counts = [min(blocks.block_rows, blocks.rows - start) for start in starts]
    write_rows(flat, blocks.offsets.tolist(), counts, matrix)
