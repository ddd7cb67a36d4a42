"""WaitingQueue: the waiting sequences, in the order of admission. No torch here.

Three kinds of urgency: *overdue*, *interactive*, *batch*; within each, the order of arrival. A
sequence whose waits add up to the limit of its class (`SchedulerLimits.max_wait_s`,
`max_batch_wait_s`) becomes overdue and stays so to its end. All later arrivals rank after it: this
bounds how long later arrivals can keep a sequence from running.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from engine.request import Priority
from engine.sequence import Sequence


class Urgency(enum.IntEnum):
    """The first part of a sequence's rank."""

    OVERDUE = 0
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The fields of `engine.config.EngineConfig` of the same names."""

    max_running: int
    max_step_tokens: int
    max_adapters: int | None = None
    max_skips: int = 64
    max_wait_s: float = 5.0
    max_batch_wait_s: float = 120.0


_by_rank = attrgetter("rank")


def insert_by_rank(sequences: list[Sequence], sequence: Sequence) -> None:
    insort(sequences, sequence, key=_by_rank)


class WaitingQueue:
    """Owns the waiting sequences and the longest time that each may still wait.

    sequences  the most urgent first
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.sequences: list[Sequence] = []
        self._limits = limits
        self._next_overdue = math.inf  # the time before which no sequence becomes overdue

    def enter(self, sequence: Sequence, now: float) -> None:
        """Add a sequence, for the first time or again; its earlier waits count."""
        if sequence.patience is None:
            is_batch = sequence.request.priority is Priority.BATCH
            urgency = Urgency.BATCH if is_batch else Urgency.INTERACTIVE
            sequence.rank = (urgency, sequence.arrival)
            limits = self._limits
            sequence.patience = limits.max_batch_wait_s if is_batch else limits.max_wait_s
        if sequence.rank[0] is not Urgency.OVERDUE:
            sequence.overdue_at = now + sequence.patience
            self._next_overdue = min(self._next_overdue, sequence.overdue_at)
        insert_by_rank(self.sequences, sequence)

    def leave(self, sequence: Sequence, now: float) -> None:
        self.sequences.remove(sequence)
        sequence.patience = max(0.0, sequence.overdue_at - now)

    def promote(self, now: float) -> None:
        """Move sequences that have become overdue to the front."""
        if now < self._next_overdue:
            return
        ordinary = [s for s in self.sequences if s.rank[0] is not Urgency.OVERDUE]
        for sequence in ordinary:
            if sequence.overdue_at <= now:
                sequence.rank = (Urgency.OVERDUE, sequence.arrival)
        self.sequences.sort(key=_by_rank)
        self._next_overdue = min(
            (s.overdue_at for s in ordinary if s.rank[0] is not Urgency.OVERDUE), default=math.inf
        )

    def of(self, urgency: Urgency) -> list[Sequence]:
        """Return the waiting of one urgency, in order of arrival."""
        first = bisect_left(self.sequences, (urgency, -1), key=_by_rank)
        last = bisect_left(self.sequences, (urgency + 1, -1), lo=first, key=_by_rank)
        return self.sequences[first:last]

    def check_integrity(self, now: float) -> None:
        """Raise AssertionError unless the queue is in order and nobody overdue goes unnoticed."""
        ranks = [sequence.rank for sequence in self.sequences]
        assert ranks == sorted(set(ranks)), "sequences out of order"
        for sequence in self.sequences:
            assert not sequence.is_running and not sequence.page_table
            assert sequence.num_computed == 0
            if sequence.rank[0] is not Urgency.OVERDUE:
                assert self._next_overdue <= sequence.overdue_at, "the next check comes too late"
                assert sequence.overdue_at >= now, "overdue without being called so"
