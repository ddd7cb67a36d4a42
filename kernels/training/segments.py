"""The division of a micro-batch of packed tokens: row after row, each run's rows together.

A run's tokens are one segment. Blocks and chunks are counted from the start of each segment, so
that what is summed in which order depends on the run's own tokens alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.training.uploads import upload

#: Tokens whose part of a gradient is one sum; a longer segment has several parts.
CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """The bounds of the packed rows: row i is tokens starts[i] to starts[i + 1].

    starts     [rows + 1] int32
    positions  [T] int64, of each token in its row
    bounds     `starts` on the host
    longest    tokens of the longest row
    """

    starts: torch.Tensor
    positions: torch.Tensor
    bounds: tuple[int, ...]
    longest: int
    _blocks: dict[int, torch.Tensor] = field(default_factory=dict)

    def blocks(self, size: int) -> torch.Tensor:
        """Return [blocks, 4] int32: first token (`size` at most), its row's start and end, 0."""
        if size not in self._blocks:
            parts = [
                (first, start, end, 0)
                for start, end in itertools.pairwise(self.bounds)
                for first in range(start, end, size)
            ]
            self._blocks[size] = _table(parts, self.starts.device)
        return self._blocks[size]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The segments in parts of at most `CHUNK` tokens.

    table   [chunks, 4] int32: segment, first token, tokens, slot for the part's sum (-1: it is the
            segment's only part, which needs none)
    merges  [segments of several parts, 4] int32: segment, first slot, slots, 0
    slots   how many there are
    """

    table: torch.Tensor
    merges: torch.Tensor
    slots: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Which run each packed token belongs to: run s owns tokens starts[s] to starts[s + 1].

    starts  [runs + 1] int32
    bounds  `starts` on the host
    """

    starts: torch.Tensor
    bounds: tuple[int, ...]
    _blocks: dict[int, torch.Tensor] = field(default_factory=dict)
    _chunks: list[Chunks] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    def blocks(self, size: int) -> torch.Tensor:
        """Return [blocks, 4] int32: segment, first token, tokens (at most `size`), 0."""
        if size not in self._blocks:
            self._blocks[size] = _table(self._parts(size), self.starts.device)
        return self._blocks[size]

    def chunks(self) -> Chunks:
        """Return the parts in which gradients are summed."""
        if not self._chunks:
            self._chunks.append(self._make_chunks())
        return self._chunks[0]

    def _make_chunks(self) -> Chunks:
        parts, merges, slots = [], [], 0
        for segment, own in itertools.groupby(self._parts(CHUNK), key=lambda part: part[0]):
            group = list(own)
            if len(group) == 1:
                parts.append((*group[0][:3], -1))
                continue
            merges.append((segment, slots, len(group), 0))
            parts += [(*part[:3], slots + i) for i, part in enumerate(group)]
            slots += len(group)
        device = self.starts.device
        return Chunks(table=_table(parts, device), merges=_table(merges, device), slots=slots)

    def _parts(self, size: int) -> list[tuple[int, int, int, int]]:
        return [
            (segment, first, min(size, end - first), 0)
            for segment, (start, end) in enumerate(itertools.pairwise(self.bounds))
            for first in range(start, end, size)
        ]


def make_rows(lengths: Sequence[int], device: torch.device | str) -> Rows:
    """Rows of these numbers of tokens, one after the other."""
    bounds = tuple(itertools.accumulate(lengths, initial=0))
    positions = [torch.arange(length) for length in lengths] or [torch.arange(0)]
    return Rows(
        starts=upload(torch.tensor(bounds, dtype=torch.int32), device),
        positions=upload(torch.cat(positions), device),
        bounds=bounds,
        longest=max(lengths, default=0),
    )


def make_segments(lengths: Sequence[int], device: torch.device | str) -> Segments:
    """Segments of these numbers of tokens, one a run; 0: the run has no rows here."""
    bounds = tuple(itertools.accumulate(lengths, initial=0))
    return Segments(upload(torch.tensor(bounds, dtype=torch.int32), device), bounds)


def _table(parts: Sequence[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    return upload(torch.tensor(parts, dtype=torch.int32).view(-1, 4), device)
