"""Read the streams into which workers write answers: a process's own, and its batches'."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from contract.messages import protocol
from contract.messages.protocol import TokenEvent
from contract.queue import scripts
from controlplane.infra.outages import REDIS_OUTAGE
from controlplane.queue.batch_reply_stream import BatchReplyStream, read_events, shielded

log = logging.getLogger(__name__)

BLOCK_MS = 2000
#: Entries of a stream that are read at a time, so that a gateway with many serves others too.
READ_ENTRIES = 200
RETRY_S = 0.2
#: Seconds without a heartbeat after which a gateway is forgotten.
FORGET_S = 60
#: An entry without events: it ends a read that waits, so that the next one has all streams.
_NUDGE = b"[]"

BEAT = scripts.load("gateway_beat")


class ReplyReader:
    """Reads all streams of one process: its own, and those of the batches that it has open.

    redis       asyncio's client, of protocol 2
    gateway_id  its own
    deliver     gives an event to the reply that waits for it, if there is one
    """

    def __init__(self, redis: Any, gateway_id: str, deliver: Callable[[TokenEvent], None]) -> None:
        self._redis = redis
        self._beat = redis.register_script(BEAT)
        self._gateway_id = gateway_id
        self._out = protocol.out_key(gateway_id)
        self._last_id = b"0-0"
        self._deliver = deliver
        self._batch_streams: dict[str, BatchReplyStream] = {}

    async def say_alive(self) -> None:
        """Send the heartbeat of this gateway; workers cancel the jobs of one that sends none.

        Batch streams are named in it for older workers: newer ones always finish their jobs.
        Raises what Redis's client raises.
        """
        open_now = [batch_stream.gateway_id for batch_stream in self._batch_streams.values()]
        await self._beat(
            keys=[protocol.GATEWAYS_KEY, self._out],
            args=[self._last_id, FORGET_S, self._gateway_id, *open_now],
        )

    async def add(self, batch_stream: BatchReplyStream) -> None:
        """Read this stream too, from the last id that it has taken in."""
        self._batch_streams[batch_stream.out] = batch_stream
        pipe = self._redis.pipeline(transaction=False)
        pipe.xadd(self._out, {protocol.PAYLOAD_FIELD: _NUDGE})
        pipe.expire(self._out, protocol.OUT_STREAM_TTL_S)
        with contextlib.suppress(*REDIS_OUTAGE):  # then it is read a moment later
            await shielded(pipe.execute())

    def remove(self, batch_stream: BatchReplyStream) -> None:
        if self._batch_streams.get(batch_stream.out) is batch_stream:
            del self._batch_streams[batch_stream.out]

    async def read_loop(self) -> None:
        """Deliver events for ever; after a reconnection, continue from the last ids."""
        while True:
            streams = {box.out: box.last_id for box in self._batch_streams.values()}
            streams[self._out] = self._last_id
            try:
                found = await self._redis.xread(streams, count=READ_ENTRIES, block=BLOCK_MS)
            except REDIS_OUTAGE as error:
                log.warning("waiting for Redis: %r", error)
                await asyncio.sleep(RETRY_S)
                continue
            for out, entries in found:
                self._take_in(out.decode(), entries)

    def _take_in(self, out: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        for entry_id, fields in entries:
            if out == self._out:
                self._last_id = entry_id
                for event in read_events(fields):
                    self._deliver(event)
            elif (batch_stream := self._batch_streams.get(out)) is not None:
                batch_stream.take_in(entry_id, fields, self._deliver)
