"""Pace: decides when serving's next step is due during a training pass."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

# Number of layers that the host may be ahead of a GPU: a request's step runs behind them.
_LAYERS_AHEAD = 2


class Stopwatch(Protocol):
    """Counts the device's seconds between each `start` and the `stop` after it."""

    @property
    def seconds(self) -> float: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class HostStopwatch:
    """A stopwatch for a CPU, whose work is done when the call returns."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None


class DeviceStopwatch:
    """A stopwatch for a GPU; `stop` also waits until the device is at most two layers behind.

    seconds  of what the device has done; what it has still to do is not counted yet
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: torch.cuda.Event | None = None
        self._parts: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        self._began = _mark()

    def stop(self) -> None:
        if self._began is not None:
            self._parts.append((self._began, _mark()))
            self._began = None
        while len(self._parts) > _LAYERS_AHEAD:
            began, ended = self._parts.popleft()
            ended.synchronize()
            self.seconds += began.elapsed_time(ended) / 1e3


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Pace:
    """Divides time between serving's steps and training, while all requests have their first token.

    share      of the time that training gets, from 0 to below 1
    longest_s  seconds from one step to the next at most, whatever the share
    """

    def __init__(self, share: float, longest_s: float) -> None:
        self._share, self._longest_s = share, longest_s
        self._stepped_at, self._trained_before = float("-inf"), 0.0

    def is_due(self, now: float, trained: float) -> bool:
        """Return whether training had its share since the last step.

        now      seconds on any clock that never goes back
        trained  seconds of training so far, in all
        """
        passed = now - self._stepped_at
        own = trained - self._trained_before
        return passed >= self._longest_s or own >= self._share * passed

    def note_step(self, now: float, trained: float) -> None:
        """Note that a step begins."""
        self._stepped_at, self._trained_before = now, trained
