"""Vectors of prompts, from the hidden states of a step's rows.

The sum of a row's hidden states is copied to the host while the device computes the next step;
`tell` adds it to its prompt's, and turns the whole into the answer. So a prompt in chunks holds one
vector. The prefix cache, which has no hidden states, serves only pooling by the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.adapters.tiles import TileMap
from engine.request import Pooling
from engine.sequence import PooledPrompt, Row, Sequence
from kernels import Blocks
from kernels.lora.vocab import block_views


@dataclass(frozen=True, slots=True)
class _Span:
    """Pooled rows of one sequence.

    head     of its classifier, where it classifies and the rows are its last
    is_last  whether nothing of the prompt follows
    """

    sequence: Sequence
    pooled: PooledPrompt
    count: int
    is_last: bool
    head: Blocks | None


class PooledRows:
    """One step's part of the vectors: planned with the batch, taken from the pass, then read.

    rows  [M] int64, the pooled rows of the pass, ascending
    x     [M, E] their hidden states, which the pass sets
    """

    def __init__(self, rows: torch.Tensor, spans: SequenceOf[_Span]) -> None:
        self.rows, self._spans = rows, spans
        self.x: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        self._scores: list[torch.Tensor | None] = []
        self._arrived: torch.cuda.Event | None = None

    def reduce(self, arena: torch.Tensor) -> None:
        """Sum the states and apply the heads, on the device; the host waits for nothing."""
        assert self.x is not None
        parts = torch.split(self.x, [span.count for span in self._spans])
        sums = torch.stack([part.sum(0, dtype=torch.float32) for part in parts])
        self._sums = _to_host(sums)
        self._scores = [
            None if span.head is None else _to_host(_score(own, span.head, arena))
            for span, own in zip(self._spans, sums, strict=True)
        ]
        self.x = None
        if sums.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def tell(self) -> list[Sequence]:
        """Wait for the step and add each row's part to its prompt's vector.

        Returns the sequences whose numbers overflowed.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._sums is not None
        overflowed = []
        for span, own, scores in zip(self._spans, self._sums, self._scores, strict=True):
            pooled = span.pooled
            pooled.total = own if pooled.total is None else pooled.total + own
            if not span.is_last:
                continue
            pooled.vector = (
                _unit(pooled.total, pooled.dimensions) if scores is None else _shares(scores)
            )
            if not all(map(math.isfinite, pooled.vector)):
                overflowed.append(span.sequence)
        return overflowed


def plan_pooled(
    rows: SequenceOf[Row],
    query_start: npt.NDArray[np.int32],
    upload: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    tiles_of: Callable[[str], TileMap],
) -> PooledRows | None:
    """Plan what a step of these rows adds to vectors; None: nothing.

    query_start  [S + 1] the first row of the pass of each
    upload       copies row numbers to the device
    tiles_of     where a resident adapter lies
    """
    spans: list[_Span] = []
    found: list[npt.NDArray[np.int64]] = []
    for row, start in zip(rows, query_start.tolist(), strict=False):
        sequence = row.sequence
        if sequence.pooled is None or not (own := row.pooled):
            continue
        end = 1 if sequence.pooled.pooling is Pooling.CLS else sequence.num_prompt
        is_last = own.stop == end
        classifies = is_last and sequence.pooled.classifies
        head = tiles_of(sequence.digests[0]).classifier if classifies else None
        spans.append(_Span(sequence, sequence.pooled, len(own), is_last, head))
        found.append(np.array(own, np.int64) + (start - sequence.num_computed))
    if not spans:
        return None
    return PooledRows(upload(np.concatenate(found)), spans)


def _score(x: torch.Tensor, head: Blocks, arena: torch.Tensor) -> torch.Tensor:
    """x [E] -> the labels' scores [labels]"""
    return torch.cat([block.float() @ x for _, _, block in block_views(arena, head)])


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _unit(total: torch.Tensor, dimensions: int | None) -> list[float]:
    """Return the first `dimensions` numbers of a sum's direction, as a vector of length one."""
    kept = total[:dimensions].double()
    vector: list[float] = (kept / kept.norm().clamp_min(1e-30)).tolist()
    return vector


def _shares(scores: torch.Tensor) -> list[float]:
    """Return the labels' probabilities."""
    shares = scores.sigmoid() if len(scores) == 1 else scores.softmax(-1)
    found: list[float] = shares.tolist()
    return found
