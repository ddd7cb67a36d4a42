"""Deadlines: which requests are too late or can no longer be in time. No torch here.

A request is given up before its deadline if a lower bound of its remaining time ends after it. The
bound assumes that the request runs alone: the missing tokens of its prompt in full steps, less what
the prefix cache has, then one token, or those up to `min_tokens`. It assumes the fastest step, and
in full steps the fastest token, that this engine has seen, and takes `_MARGIN` of the result.
Queueing does not count: requests ahead may be cancelled. Before `_NUM_OBSERVED` steps nothing is
given up.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import DeadlineExceeded, DeadlineUnreachable
from engine.sequence import Sequence

_MARGIN = 0.5
_NUM_OBSERVED = 8


class Pace:
    """Measures the fastest step and the fastest token of this engine.

    max_step_tokens  tokens of a full step
    most_per_step    tokens that one step may add to a request
    """

    def __init__(self, max_step_tokens: int, most_per_step: int = 1) -> None:
        self._max_step_tokens, self._most_per_step = max_step_tokens, most_per_step
        self._num_observed = 0
        self._step_s = self._token_s = math.inf
        self._started: tuple[float, int] | None = None

    def start(self, now: float, num_tokens: int) -> None:
        """Note that a step of `num_tokens` tokens begins; it ends before the next `stop`."""
        self._started = (now, num_tokens)

    def stop(self, now: float) -> None:
        """Note that the step has ended, as the next one is about to begin."""
        if self._started is None:
            return
        start, num_tokens = self._started
        self._started = None
        seconds = now - start
        if seconds <= 0:
            return
        self._num_observed += 1
        self._step_s = min(self._step_s, seconds)
        # A half-full step takes at most twice as long per token as a full one: `_MARGIN` is that.
        if 2 * num_tokens >= self._max_step_tokens:
            self._token_s = min(self._token_s, seconds / num_tokens)

    def least_s(self, num_tokens: int, num_more: int) -> float:
        """Return the fewest seconds for `num_tokens` and then `num_more`, step by step."""
        if self._num_observed < _NUM_OBSERVED:
            return 0.0
        num_more = -(-num_more // self._most_per_step)
        num_steps = -(-num_tokens // self._max_step_tokens) + num_more
        by_steps = num_steps * self._step_s
        by_tokens = 0.0 if self._token_s == math.inf else num_tokens * self._token_s
        return _MARGIN * max(by_steps, by_tokens + num_more * self._step_s)


@dataclass(order=True, slots=True)
class _Entry:
    deadline: float
    request_id: str


class Deadlines:
    """Owns the deadlines of the requests that have one.

    count_uncomputed  tokens that a sequence would have to compute if it ran now
    most_per_step     tokens that one step may add to a request
    """

    def __init__(
        self,
        max_step_tokens: int,
        count_uncomputed: Callable[[Sequence], int],
        most_per_step: int = 1,
    ) -> None:
        self.pace = Pace(max_step_tokens, most_per_step)
        self._count_uncomputed = count_uncomputed
        self._entries: list[_Entry] = []  # the next one first
        self._sequences: dict[str, list[Sequence]] = {}
        self._most_tokens = self._most_more = 0  # maxima over all requests

    def add(self, sequences: list[Sequence]) -> None:
        """Watch a request; `sequences` are those that have not ended, now and later."""
        request = sequences[0].request
        if request.deadline is None:
            return
        self._sequences[request.request_id] = sequences
        insort(self._entries, _Entry(request.deadline, request.request_id))
        self._most_tokens = max(self._most_tokens, len(request.token_ids))
        self._most_more = max(self._most_more, _num_required(sequences[0]))

    def remove(self, request_id: str) -> None:
        if self._sequences.pop(request_id, None) is not None:
            self._entries = [e for e in self._entries if e.request_id != request_id]
        if not self._entries:
            self._most_tokens = self._most_more = 0

    def too_late(self, now: float) -> list[tuple[str, DeadlineExceeded]]:
        """Return the requests that cannot end in time, each with its error."""
        found: list[tuple[str, DeadlineExceeded]] = []
        # What a request has generated may have to be computed again after a preemption.
        most_tokens = self._most_tokens + self._most_more
        horizon = now + self.pace.least_s(most_tokens, self._most_more)
        for entry in self._entries:
            if entry.deadline > horizon:
                break
            if entry.deadline <= now:
                error = DeadlineExceeded("the request's deadline has passed", param="deadline")
                found.append((entry.request_id, error))
            elif any(self._is_hopeless(s, now) for s in self._sequences[entry.request_id]):
                unreachable = DeadlineUnreachable(
                    f"the request's deadline is {entry.deadline - now:.3g} s away and can no "
                    "longer be met",
                    param="deadline",
                )
                found.append((entry.request_id, unreachable))
        return found

    def _is_hopeless(self, sequence: Sequence, now: float) -> bool:
        deadline = sequence.request.deadline
        assert deadline is not None
        num_more = max(0, _num_required(sequence) - sequence.num_generated - 1)
        if now + self.pace.least_s(sequence.num_uncomputed, num_more) <= deadline:
            return False
        num_tokens = self._count_uncomputed(sequence)
        return now + self.pace.least_s(num_tokens, num_more) > deadline


def _num_required(sequence: Sequence) -> int:
    """Tokens that the sequence must generate before it may end."""
    sampling = sequence.request.sampling
    if sequence.request.grammar is not None:
        return 1  # its grammar says when it is complete
    required = max(1, sampling.min_tokens)
    return required if sampling.max_tokens is None else min(required, sampling.max_tokens)
