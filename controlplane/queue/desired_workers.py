"""The number of workers that a base model needs now, for an autoscaler."""

from __future__ import annotations

import math
from collections.abc import Iterable

from contract.messages.protocol import Heartbeat

#: Weight of the newest measurement.
_SHARE = 0.3


class FullSpeed:
    """The tokens a second of one full worker of each base model, as measured.

    A worker that has room generates less than it could, and one that has just become full shows
    the time before: only those that were full the last time, too, are counted.
    """

    def __init__(self) -> None:
        self._tokens_per_s: dict[str, float] = {}
        self._full_at: dict[str, int] = {}  # worker that was full -> its step then

    def observe(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Take in the newest heartbeats of workers that live."""
        full = [beat for beat in heartbeats if 0 < beat.max_running <= beat.running]
        for beat in full:
            if self._full_at.get(beat.worker_id, beat.step) != beat.step and beat.tokens_per_s > 0:
                before = self._tokens_per_s.get(beat.base_model, beat.tokens_per_s)
                now = before + _SHARE * (beat.tokens_per_s - before)
                self._tokens_per_s[beat.base_model] = now
        self._full_at = {beat.worker_id: beat.step for beat in full}

    def of(self, base_model: str) -> float:
        """Return a full worker's tokens a second; 0: no worker has been full yet."""
        return self._tokens_per_s.get(base_model, 0.0)


def desired_workers(
    *,
    running: int,
    max_running: int,
    waiting_requests: int,
    waiting_tokens: int,
    tokens_per_s: float,
    target_wait_s: float,
) -> int:
    """Return the workers that hold what runs and do what waits within `target_wait_s`.

    running         requests in all workers' engines
    max_running     those that one worker can run at a time; 0: not known, as none lives
    tokens_per_s    of one full worker; 0: not known, then what waits counts by requests

    At least 1: without any worker requests are refused, so that nothing would ever wait.
    """
    busy = running / max_running if max_running else 0.0
    if not waiting_requests:
        more = 0.0
    elif tokens_per_s > 0 and waiting_tokens:
        more = waiting_tokens / (tokens_per_s * target_wait_s)
    elif max_running:
        more = waiting_requests / max_running
    else:
        more = 1.0
    return max(1, math.ceil(round(busy + more, 6)))
