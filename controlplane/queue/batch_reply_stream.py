"""The reply stream of a batch, into which workers write the answers to its lines.

Answers to a gateway are of use to that process alone. A batch outlives its runners, so its lines
are answered into a stream of the batch's own. The runner that has the batch reads it from the
start: what was answered while nobody read, what is still under way, and under which id. An entry is
removed when the results of its lines are kept, and no sooner.

The id of an attempt follows from the batch, the line and the attempt's number. So a line that is
sent twice is one request: the queue accepts it once while it knows it, and the database bills it
once. The script that admits a line checks the runner's fencing token: a runner that was given up
for lost and wakes can begin nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from contract.messages import protocol
from contract.messages.protocol import AdapterRef, GenerateJob, TokenEvent
from contract.queue import reply_streams, scripts
from controlplane.errors import Unavailable
from controlplane.infra.outages import REDIS_OUTAGE

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_PAGE = 100

ADMIT_LINE = scripts.load("admit_line")
OPEN = scripts.load("open_batch_stream")
CLOSE = scripts.load("close_batch_stream")


class Fenced(Exception):
    """Another runner has the batch now."""


def line_request_id(batch_id: uuid.UUID, line: int, attempt: int) -> str:
    """Return the id of an attempt at a line; ids of a batch lie together in the index."""
    return f"req_{batch_id.hex[:12]}{uuid.uuid5(batch_id, f'{line} {attempt}').hex[12:]}"


class BatchReplyStream:
    """The reply stream of one batch, for the runner that holds its lease. `open` it first.

    redis  asyncio's client, of protocol 2
    fence  of the lease
    """

    def __init__(self, redis: Any, pool: str, batch_id: uuid.UUID, fence: int) -> None:
        self.gateway_id = reply_streams.batch_stream_id(batch_id.hex)
        self.out = protocol.out_key(self.gateway_id)
        self.last_id = b"0-0"
        self._redis = redis
        self._batch_id = batch_id
        self._fence = fence
        self._key = reply_streams.pending_lines_key(pool, batch_id.hex)
        self._attempts: dict[int, int] = {}
        self._under_way: set[int] = set()
        self._lines: dict[str, int] = {}  # request id -> line, of the attempts that count
        self._pending_lines: dict[str, dict[str, Any]] = {}  # for requests found under way
        self._news: dict[str, list[TokenEvent]] = {}  # events for requests that are not settled
        self._entries: dict[bytes, set[str]] = {}  # -> the requests that still need them
        self._spent: list[bytes] = []
        self._landed: list[int] = []  # lines that are not under way any more

    async def open(self) -> None:
        """Read what the stream has so far. Raises Fenced, and Unavailable."""
        try:
            await shielded(self._open())
        except REDIS_OUTAGE as error:
            raise Unavailable("The queue does not answer.") from error

    async def _open(self) -> None:
        found = await self._redis.eval(OPEN, 1, self._key, self._fence)
        if not found:
            raise Fenced
        for field, value in zip(found[::2], found[1::2], strict=True):
            if field != b"fence":
                line, pending_line = int(field), json.loads(value)
                self._attempts[line] = pending_line["attempt"]
                self._under_way.add(line)
                self._pending_lines[self.request_id(line)] = pending_line
        while True:
            after = f"({self.last_id.decode()}"
            entries = await self._redis.xrange(self.out, after, count=_PAGE)
            for entry_id, fields in entries:
                self.take_in(entry_id, fields, lambda _: None)
            if len(entries) < _PAGE:
                return

    @property
    def lines_under_way(self) -> set[int]:
        """The lines that some runner had admitted and whose results are not kept yet."""
        return self._under_way.copy()

    def is_under_way(self, request_id: str) -> bool:
        """Return whether the request was admitted: its answer is here, or will come."""
        return self._lines.get(request_id) in self._under_way

    def num_attempts(self, line: int) -> int:
        return self._attempts.get(line, 1)

    def request_id(self, line: int) -> str:
        """Return the id under which the line is sent, or was sent."""
        request_id = line_request_id(self._batch_id, line, self.num_attempts(line))
        self._lines[request_id] = line
        return request_id

    def try_again(self, line: int) -> None:
        """Begin another attempt, under an id of its own, after one that ended without an answer.

        The end of the last one is kept until this one is admitted, for a runner that comes then.
        """
        self._attempts[line] = self.num_attempts(line) + 1
        self._under_way.discard(line)

    def send_again(self, line: int) -> None:
        """Let a request that Redis lost be sent again under its own id; it is billed once."""
        self._under_way.discard(line)
        self._pending_lines.pop(self.request_id(line), None)

    def admission(self, job: GenerateJob) -> tuple[list[str], list[Any]]:
        """Return the keys of ADMIT_LINE behind the job's key, and its first arguments."""
        line = self._lines[job.request_id]
        pending_line = {
            "attempt": self.num_attempts(line),
            "created_at": job.created_at,
            "base_model": job.base_model,
            "adapters": [ref.to_dict() for ref in job.adapters],
        }
        return [self._key], [self._fence, line, json.dumps(pending_line, separators=(",", ":"))]

    def as_admitted(self, job: GenerateJob) -> GenerateJob:
        """Return the job as it was admitted: by now its model's name may mean other weights."""
        pending_line = self._pending_lines.get(job.request_id)
        if pending_line is None:
            return job
        adapters = tuple(AdapterRef.from_dict(ref) for ref in pending_line["adapters"])
        return dataclasses.replace(job, created_at=pending_line["created_at"], adapters=adapters)

    def base_model_of(self, request_id: str) -> str | None:
        """Return the base model of a request that was found under way; None for any other."""
        pending_line = self._pending_lines.get(request_id)
        return None if pending_line is None else pending_line.get("base_model")

    def note_admitted(self, request_id: str) -> None:
        line = self._lines[request_id]
        self._under_way.add(line)
        if self.num_attempts(line) > 1:
            self._forget({other for other, of in self._lines.items() if of == line} - {request_id})

    def take_in(
        self,
        entry_id: bytes,
        fields: dict[bytes, bytes],
        deliver: Callable[[TokenEvent], None],
    ) -> None:
        """Deliver an entry's events, and keep them for a runner that asks again."""
        if _order(entry_id) <= _order(self.last_id):
            return  # asked for before this stream was opened
        self.last_id = entry_id
        events = read_events(fields)
        needed_by = {event.request_id for event in events} & self._lines.keys()
        if not needed_by:
            self._spent.append(entry_id)
            return
        self._entries[entry_id] = needed_by
        for event in events:
            if event.request_id in needed_by:
                self._news.setdefault(event.request_id, []).append(event)
                deliver(event)

    def news(self, request_id: str) -> list[TokenEvent]:
        """Return the events that came so far for a request, delivered or not."""
        return self._news.get(request_id, []).copy()

    async def settle(self, lines: set[int]) -> None:
        """Forget these lines: their results are kept.

        If Redis does not answer, the next call does it, or the batch's next runner.
        """
        settled = {request_id for request_id, line in self._lines.items() if line in lines}
        self._landed += {self._lines[request_id] for request_id in settled}
        self._forget(settled)
        for line in self._landed:
            self._under_way.discard(line)
            self._attempts.pop(line, None)
        pipe = self._redis.pipeline(transaction=False)
        if self._spent:
            pipe.xdel(self.out, *self._spent)
        if self._landed:
            pipe.hdel(self._key, *self._landed)
        try:
            await shielded(pipe.execute())
        except REDIS_OUTAGE as error:
            log.warning("what was answered stays in %s: %r", self.out, error)
        else:
            self._spent, self._landed = [], []

    async def close(self) -> None:
        """Remove the stream of a batch that has ended. Raises Unavailable."""
        try:
            await shielded(self._redis.eval(CLOSE, 2, self._key, self.out, self._fence))
        except REDIS_OUTAGE as error:
            raise Unavailable("The queue does not answer.") from error

    def _forget(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            del self._lines[request_id]
            self._pending_lines.pop(request_id, None)
            self._news.pop(request_id, None)
        for entry_id, needed_by in list(self._entries.items()):
            needed_by -= request_ids
            if not needed_by:
                del self._entries[entry_id]
                self._spent.append(entry_id)


async def shielded(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`; a cancellation ends the waiting, but not the work.

    For commands to Redis: its client sends with `asyncio.wait_for`, which before Python 3.12 may
    lose a cancellation, so that the cancelled task would keep running.
    """
    return await asyncio.shield(asyncio.create_task(work))


def _order(entry_id: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split(b"-")))


def read_events(fields: dict[bytes, bytes]) -> list[TokenEvent]:
    """Return the events of an entry; [] for one that cannot be read."""
    try:
        return protocol.unpack_events(fields[protocol.PAYLOAD_FIELD])
    except (ValueError, TypeError, KeyError, AttributeError):
        log.exception("an entry of the event stream cannot be read")
        return []
