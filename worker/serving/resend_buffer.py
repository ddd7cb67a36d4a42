"""ResendBuffer: keeps the latest ends of requests, and sends them again if Redis has lost them.

A DoneRecord is in Redis for a moment before the accountant reads it. If Redis restarts without its
file, or a replica that is slightly behind takes over, the records of that moment are lost: the
requests were answered but would not be billed. So a worker keeps its last records, checks with each
heartbeat whether Redis is still the same run, and sends them again to a new one. The script refuses
those that Redis still has, and the database stores a request's usage once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from worker.serving.streams import EventUpdate, Streams

log = logging.getLogger(__name__)

#: Longer than a running accountant is behind. Time counts only while Redis answers.
KEEP_S = 30.0
MAX_KEPT = 10_000
_AT_ONCE = 100


class ResendBuffer:
    """Owns the ends that were published in the last `KEEP_S` seconds."""

    def __init__(self, streams: Streams, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._clock = clock
        self._ends: deque[tuple[float, str, EventUpdate]] = deque(maxlen=MAX_KEPT)
        self._server_run = ""

    def keep(self, gateway_id: str, news: Sequence[EventUpdate]) -> None:
        """Keep the ends among these updates, which Redis has stored."""
        now = self._clock()
        self._ends.extend((now, gateway_id, item) for item in news if item.done is not None)

    async def resend_lost(self) -> None:
        """Send the ends again if Redis has restarted since the last call; forget old ones.

        Raises RedisError; the next call then continues.
        """
        server_run = await self._streams.server_run()
        if server_run != self._server_run and self._server_run:
            log.warning("Redis was restarted: %d ends are sent again", len(self._ends))
            await self._resend()
        self._server_run = server_run
        while self._ends and self._ends[0][0] < self._clock() - KEEP_S:
            self._ends.popleft()

    async def _resend(self) -> None:
        by_gateway: dict[str, list[EventUpdate]] = {}
        for _, gateway_id, item in self._ends:
            by_gateway.setdefault(gateway_id, []).append(item)
        for gateway_id, news in by_gateway.items():
            for start in range(0, len(news), _AT_ONCE):
                await self._streams.publish(gateway_id, news[start : start + _AT_ONCE])
