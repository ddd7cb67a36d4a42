"""ExtrasTable: the gains, shifts and vocabulary rows of a step's adapters, for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.adapters.tiles import RowMap, TileMap, VocabMap
from engine.memory.prefix_cache import AdapterKey
from kernels import AdjustTable, ExtraSegment, LoraExtras, NewRows, RowTable, VocabPart

# Largest number of tokens with new rows of a virtual adapter in a RowTable: a kernel looks through
# them.
MAX_TABLE_TOKENS = 1024

ToTensor = Callable[[npt.NDArray[np.generic]], torch.Tensor]


class ExtrasTable:
    """The extras of a table's virtual adapters; most tables have none.

    keys        the table's virtual adapters
    tiles       of each virtual adapter's parts
    has_tables  whether kernels replace rows by `RowTable`s; else they follow segments
    """

    def __init__(
        self,
        keys: Sequence[AdapterKey],
        tiles: Sequence[list[TileMap]],
        to_tensor: ToTensor,
        *,
        has_tables: bool,
    ) -> None:
        self._to_tensor = to_tensor
        weights = [[weight for _, weight in key] for key in keys]
        self._has_extras = [any(part.has_extras for part in parts) for parts in tiles]
        each = list(zip(tiles, weights, strict=True))
        self._embedding = [_vocab_parts([p.embedding for p in parts], own) for parts, own in each]
        self._head = [_vocab_parts([p.head for p in parts], own) for parts, own in each]
        self._new_embedding = [_new_rows([p.new_embedding for p in ps], own) for ps, own in each]
        self._new_head = [_new_rows([p.new_head for p in parts], own) for parts, own in each]
        self._adjust = _adjust_table(tiles, weights, to_tensor)
        self._rows: list[RowTable | None] = [None, None]
        if has_tables:
            for i, (parts, rows) in enumerate(
                ((self._embedding, self._new_embedding), (self._head, self._new_head))
            ):
                few = [
                    own if _are_few(own) and not wide else ()
                    for own, wide in zip(rows, parts, strict=True)
                ]
                self._rows[i] = _row_table(few, to_tensor)
                rows[:] = [() if found else own for own, found in zip(rows, few, strict=True)]

    def of_step(
        self,
        seg_indptr: Sequence[int],
        seg_adapter: Sequence[int],
        sample_rows: npt.NDArray[np.int64],
    ) -> LoraExtras:
        """Return the extras of the step's segments, as in `kernels.LoraBatch`.

        sample_rows  rows that sample, ascending
        """
        row_adapter = np.full(seg_indptr[-1], -1, np.int32)
        segments = []
        firsts = np.searchsorted(sample_rows, seg_indptr).tolist()
        for i, adapter in enumerate(seg_adapter):
            start, end = seg_indptr[i], seg_indptr[i + 1]
            if adapter < 0 or not self._has_extras[adapter]:
                continue
            row_adapter[start:end] = adapter
            segments.append(
                ExtraSegment(
                    start=start,
                    end=end,
                    first=firsts[i],
                    last=firsts[i + 1],
                    adapter=adapter,
                    embedding=self._embedding[adapter],
                    head=self._head[adapter],
                    new_embedding=self._new_embedding[adapter],
                    new_head=self._new_head[adapter],
                )
            )
        return LoraExtras(
            segments=tuple(segments),
            row_adapter=self._to_tensor(row_adapter),
            adjust=self._adjust,
            embedding_rows=self._rows[0],
            head_rows=self._rows[1],
        )


def _vocab_parts(
    maps: Sequence[VocabMap | None], weights: Sequence[float]
) -> tuple[VocabPart, ...]:
    return tuple(
        VocabPart(weight=w, scale=own.scale, a=own.a, b=own.b, gain=own.gain, shift=own.shift)
        for own, w in zip(maps, weights, strict=True)
        if own is not None
    )


def _new_rows(maps: Sequence[RowMap | None], weights: Sequence[float]) -> tuple[NewRows, ...]:
    return tuple(
        NewRows(weight=w, token_ids=own.token_ids, blocks=own.blocks)
        for own, w in zip(maps, weights, strict=True)
        if own is not None
    )


def _are_few(parts: Sequence[NewRows]) -> bool:
    """Return whether a virtual adapter's new rows have a place in a table."""
    counts = [0 if part.token_ids is None else len(part.token_ids) for part in parts]
    return all(counts) and sum(counts) <= MAX_TABLE_TOKENS


def _row_table(rows: Sequence[tuple[NewRows, ...]], to_tensor: ToTensor) -> RowTable | None:
    """Return the new rows of every virtual adapter; None when there are none at all."""
    if not any(rows):
        return None
    counts: list[int] = []
    token_ids: list[npt.NDArray[np.int64]] = []
    num_parts: list[npt.NDArray[np.int64]] = []
    offsets: list[npt.NDArray[np.int64]] = []
    weights: list[npt.NDArray[np.float32]] = []
    for parts in rows:
        counts.append(0)
        if not parts:
            continue
        given = [part.token_ids for part in parts if part.token_ids is not None]
        tokens, num = np.unique(np.concatenate(given), return_counts=True)
        order = np.argsort(np.concatenate(given), kind="stable")
        counts[-1] = len(tokens)
        token_ids.append(tokens)
        num_parts.append(num)
        offsets.append(np.concatenate([_row_offsets(part) for part in parts])[order])
        own = [np.full(part.blocks.rows, part.weight, np.float32) for part in parts]
        weights.append(np.concatenate(own)[order])
    all_counts = np.array(counts, np.int32)
    all_parts = np.concatenate(num_parts)
    return RowTable(
        first=to_tensor((np.cumsum(all_counts) - all_counts).astype(np.int32)),
        count=to_tensor(all_counts),
        token_id=to_tensor(np.concatenate(token_ids).astype(np.int32)),
        part_start=to_tensor((np.cumsum(all_parts) - all_parts).astype(np.int32)),
        num_parts=to_tensor(all_parts.astype(np.int32)),
        offset=to_tensor(np.concatenate(offsets)),
        weight=to_tensor(np.concatenate(weights)),
    )


def _row_offsets(part: NewRows) -> npt.NDArray[np.int64]:
    """Return the place in the flat arena where each row begins."""
    rows, blocks = np.arange(part.blocks.rows), part.blocks
    starts = blocks.offsets[rows // blocks.block_rows]
    found: npt.NDArray[np.int64] = starts + rows % blocks.block_rows * blocks.width
    return found


def _adjust_table(
    tiles: Sequence[list[TileMap]], weights: Sequence[list[float]], to_tensor: ToTensor
) -> AdjustTable | None:
    """Return the gains and shifts of every virtual adapter; None when there are none at all."""
    num_parts: list[int] = []
    gains: list[npt.NDArray[np.int64]] = []
    shifts: list[npt.NDArray[np.int64]] = []
    weight: list[npt.NDArray[np.float32]] = []
    for parts, own in zip(tiles, weights, strict=True):
        adjusting = [(part, w) for part, w in zip(parts, own, strict=True) if part.adjusts]
        num_parts.append(len(adjusting))
        if not adjusting:
            continue
        # [L * 8, parts], as the entries of tiles are.
        nothing = np.full(len(parts[0].rows), -1, np.int64)
        for offsets, found in ((gains, "gain_offset"), (shifts, "shift_offset")):
            columns = [getattr(part, found) for part, _ in adjusting]
            columns = [nothing if column is None else column for column in columns]
            offsets.append(np.stack(columns, axis=1).ravel())
        weight.append(np.tile(np.array([w for _, w in adjusting], np.float32), len(nothing)))
    if not gains:
        return None
    sizes = [0]
    ends = iter(gains)
    for count in num_parts:
        sizes.append(len(next(ends)) if count else 0)
    return AdjustTable(
        part_start=to_tensor(np.cumsum(sizes)[:-1].astype(np.int64)),
        num_parts=to_tensor(np.array(num_parts, np.int32)),
        gain_offset=to_tensor(np.concatenate(gains)),
        shift_offset=to_tensor(np.concatenate(shifts)),
        weight=to_tensor(np.concatenate(weight)),
    )
