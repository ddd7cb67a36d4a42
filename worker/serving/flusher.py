"""Flusher: sends the events of requests, one stream entry per gateway and flush.

A request's first token and its end are sent at once; other tokens wait until `interval_s` after the
last flush. So at high load one Redis command carries many tokens, and at low load none waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from contract.messages.protocol import DoneRecord
from contract.queue.reply_streams import is_batch_stream
from worker.serving.active_request import ActiveRequest
from worker.serving.resend_buffer import ResendBuffer
from worker.serving.spool import Spool
from worker.serving.streams import EventUpdate, Streams

log = logging.getLogger(__name__)

RETRY_S = 0.2


class Flusher:
    """Owns the requests with unsent events.

    While Redis is away they wait here; those that have ended are also on the disk, so that nothing
    is lost.

    on_refused  called with the inbox entries of attempts whose lease was taken over
    on_end      called with the record of each request whose end Redis has taken
    """

    def __init__(
        self,
        streams: Streams,
        *,
        interval_s: float,
        on_refused: Callable[[list[bytes]], None],
        spool: Spool,
        on_end: Callable[[DoneRecord], None] = lambda record: None,
    ) -> None:
        self._streams = streams
        self._spool = spool
        self.resend_buffer = ResendBuffer(streams)
        self._interval_s = interval_s
        self._on_refused, self._on_end = on_refused, on_end
        # By inbox entry, since two attempts of one request may be here.
        self._waiting: dict[bytes, ActiveRequest] = {}
        self._sending: set[bytes] = set()
        self._is_spooled = False
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, request: ActiveRequest) -> None:
        """Send this request's events with the next flush."""
        if not request.has_news:
            return
        self._waiting[request.entry_id] = request
        self._idle.clear()
        self._news.set()
        if request.is_urgent:
            self._urgent.set()

    @property
    def unsent(self) -> set[bytes]:
        """The attempts with events that have not reached Redis yet."""
        return self._sending.union(self._waiting)

    def forget(self, entry_id: bytes) -> None:
        self._waiting.pop(entry_id, None)

    async def run(self) -> None:
        """Flush until the task is cancelled."""
        clock = asyncio.get_running_loop().time
        last = clock() - self._interval_s
        while True:
            await self._news.wait()
            delay = last + self._interval_s - clock()
            if delay > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._urgent.wait()
            self._news.clear()
            self._urgent.clear()
            last = clock()
            await self._flush()
            if not self._waiting:
                self._idle.set()

    async def drained(self) -> None:
        """Wait until everything is sent."""
        await self._idle.wait()

    async def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._sending = set(waiting)
        by_gateway = sorted(waiting.values(), key=turn)
        for (_, gateway_id), requests in itertools.groupby(by_gateway, key=turn):
            news = [item for request in requests for item in request.take_news()]
            await self._publish(gateway_id, news)
        self._sending = set()
        if self._is_spooled and not self._waiting:
            self._spool.clear()
            self._is_spooled = False

    async def _publish(self, gateway_id: str, news: list[EventUpdate]) -> None:
        while True:
            try:
                refused = await self._streams.publish(gateway_id, news)
            except (RedisError, OSError) as error:
                log.warning("news wait for Redis: %r", error)
                self._spool.add(gateway_id, news)
                self._spool_waiting()
                self._is_spooled = True
                await asyncio.sleep(RETRY_S)
                continue
            self.resend_buffer.keep(gateway_id, news)
            for item in news:
                if item.done is not None and item not in refused:
                    self._on_end(item.done)
            if refused:
                ids = dict.fromkeys(item.event.request_id for item in refused)
                log.warning("refused, for the lease was taken over: %s", ", ".join(ids))
                self._on_refused(list(dict.fromkeys(item.entry_id for item in refused)))
            return

    def _spool_waiting(self) -> None:
        """Write to the disk the ends of requests that wait for the blocked flush."""
        for request in self._waiting.values():
            if request.is_finished:
                self._spool.add(request.job.gateway_id, request.peek_news())

    async def replay(self) -> None:
        """Publish what an earlier run could not publish; raise RedisError."""
        for gateway_id, news in self._spool.read():
            await self._streams.publish(gateway_id, [news])
        self._spool.clear()


def turn(request: ActiveRequest) -> tuple[bool, str]:
    """Return the sort key of a request: gateways' events go before batches', which may be many."""
    gateway_id = request.job.gateway_id
    return is_batch_stream(gateway_id), gateway_id
