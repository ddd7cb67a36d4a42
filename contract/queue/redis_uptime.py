"""Measure for how long Redis has answered a process without a break. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable

from contract.messages.protocol import HEARTBEAT_TIMEOUT_S, MAX_UNWATCHED_S


class RedisUptime:
    """Tells whether Redis has answered for long enough that a silent process must be dead.

    While Redis was away, no heartbeat reached it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = self._since = clock()

    def note(self) -> None:
        """Note that Redis has taken a heartbeat."""
        now = self._clock()
        if now - self._last > MAX_UNWATCHED_S:
            self._since = now
        self._last = now

    @property
    def is_steady(self) -> bool:
        return self._last - self._since >= HEARTBEAT_TIMEOUT_S
