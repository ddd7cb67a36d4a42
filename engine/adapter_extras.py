"""What a step's adapters have beside tiles, as the kernels want it: gains, shifts, vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.adapter_tiles import TileMap, VocabMap
from engine.prefix_cache import AdapterKey
from kernels import AdjustTable, ExtraSegment, LoraExtras, VocabPart

ToTensor = Callable[[npt.NDArray[np.generic]], torch.Tensor]


class ExtrasTable:
    """The extras of a table's virtual adapters; most tables have none and need no such thing.

    keys   the table's virtual adapters
    tiles  those of each one's parts
    """

    def __init__(
        self, keys: Sequence[AdapterKey], tiles: Sequence[list[TileMap]], to_tensor: ToTensor
    ) -> None:
        self._to_tensor = to_tensor
        weights = [[weight for _, weight in key] for key in keys]
        self._has_extras = [any(part.has_extras for part in parts) for parts in tiles]
        self._embedding = [
            _vocab_parts([part.embedding for part in parts], own)
            for parts, own in zip(tiles, weights, strict=True)
        ]
        self._head = [
            _vocab_parts([part.head for part in parts], own)
            for parts, own in zip(tiles, weights, strict=True)
        ]
        self._adjust = _adjust_table(tiles, weights, to_tensor)

    def of_step(
        self,
        seg_indptr: Sequence[int],
        seg_adapter: Sequence[int],
        sample_rows: npt.NDArray[np.int64],
    ) -> LoraExtras:
        """The extras of the step's segments, as in `kernels.LoraBatch`.

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
                )
            )
        return LoraExtras(
            segments=tuple(segments),
            row_adapter=self._to_tensor(row_adapter),
            adjust=self._adjust,
        )


def _vocab_parts(
    maps: Sequence[VocabMap | None], weights: Sequence[float]
) -> tuple[VocabPart, ...]:
    return tuple(
        VocabPart(weight=w, scale=own.scale, a=own.a, b=own.b, gain=own.gain, shift=own.shift)
        for own, w in zip(maps, weights, strict=True)
        if own is not None
    )


def _adjust_table(
    tiles: Sequence[list[TileMap]], weights: Sequence[list[float]], to_tensor: ToTensor
) -> AdjustTable | None:
    """The gains and shifts of every virtual adapter; None when there are none at all."""
    num_parts: list[int] = []
    gains: list[npt.NDArray[np.int64]] = []
    shifts: list[npt.NDArray[np.int64]] = []
    weight: list[npt.NDArray[np.float32]] = []
    for parts, own in zip(tiles, weights, strict=True):
        adjusting = [(part, w) for part, w in zip(parts, own, strict=True) if part.adjusts]
        num_parts.append(len(adjusting))
        if not adjusting:
            continue
        # [L * 7, parts], as the entries of tiles are.
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
