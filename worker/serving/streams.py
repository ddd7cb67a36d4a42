"""Streams: all Redis commands of a worker. `contract.messages.protocol` explains the keys."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ResponseError

from contract.messages import protocol
from contract.messages.protocol import ControlMessage, DoneRecord, Heartbeat, TokenEvent, Usage
from contract.queue import fair_queue, reply_streams, scripts
from contract.queue.deleted_adapters import gone_key

log = logging.getLogger(__name__)

SCRIPTS = (
    "begin",
    "mark_poison",
    "publish",
    "pull",
    "requeue",
    "run_alone",
    "unregister",
    "worker_beat",
)

READ_COUNT = 64
#: More entries than a worker ever holds.
INBOX_COUNT = 4096
BLOCK_MS = 2000
#: Largest size of the events in one entry, in bytes, unless one event is larger: Redis and a
#: gateway do nothing else while they take an entry in.
MAX_ENTRY_BYTES = 2 * 1024**2


class _CountingRetry(Retry):
    """Counts each attempt of this process that Redis did not answer."""

    num_errors = 0

    async def call_with_retry(self, do: Any, fail: Any, *args: Any, **kwargs: Any) -> Any:
        def counted(*failure: Any) -> Any:
            _CountingRetry.num_errors += 1
            return fail(*failure)

        return await super().call_with_retry(do, counted, *args, **kwargs)


class Replaced(Exception):
    """Another run has this worker's id now: this one was paused and thought dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The state of a request as this worker takes it up; the counts are of earlier attempts."""

    #: "queued", "running" (an attempt was lost), "done", "gone", or "replaced" by another run.
    state: str
    lease: int = 0
    attempt: int = 0
    emitted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_cancelled: bool = False

    @property
    def usage(self) -> Usage:
        """The usage that earlier attempts reported."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.emitted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """A request that was just dispatched to this worker."""

    entry_id: bytes
    payload: bytes
    dispatch: Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EventUpdate:
    """One event of a request, and what is stored with it; `done` with the last event."""

    event: TokenEvent
    entry_id: bytes
    emitted: int
    prompt_tokens: int
    cached_tokens: int
    done: DoneRecord | None = None


class Streams:
    """A worker's connection to Redis. Every method may raise redis.exceptions.RedisError."""

    def __init__(self, redis_url: str, *, pool: str, worker_id: str, boot_id: str) -> None:
        # Any: the client's own types cover all protocol versions at once.
        self._redis: Any = redis.asyncio.from_url(
            redis_url,
            protocol=2,  # XREAD answers with pairs; under RESP3 with a map
            socket_connect_timeout=5,
            socket_timeout=5 + BLOCK_MS / 1000,
            retry=_CountingRetry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            health_check_interval=30,
        )
        self._pool = pool
        self._worker_id = worker_id
        self._boot_id = boot_id
        self._inbox = protocol.inbox_key(pool, worker_id)
        self._control = protocol.control_key(pool, worker_id)
        self._gone = gone_key(pool)
        self._has_come = False  # whether a heartbeat was sent
        self._scripts = {name: self._redis.register_script(scripts.load(name)) for name in SCRIPTS}

    @property
    def num_errors(self) -> int:
        """Return how often Redis did not answer, of all clients of this process."""
        return _CountingRetry.num_errors

    async def close(self) -> None:
        await self._redis.aclose()

    async def prepare(self) -> None:
        """Make the inbox and its group if they are not there."""
        try:
            await self._redis.xgroup_create(
                self._inbox, protocol.INBOX_GROUP, id="0", mkstream=True
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def last_control_id(self) -> bytes:
        """Return the id of the newest control message; messages before the start are ignored."""
        newest = await self._redis.xrevrange(self._control, count=1)
        return newest[0][0] if newest else b"0-0"

    async def deleted_adapters(self) -> list[str]:
        """Return the digests of adapters that were deleted, also while this worker was away."""
        return [digest.decode() for digest in await self._redis.zrange(self._gone, 0, -1)]

    async def read_control(self, after: bytes) -> list[tuple[bytes, ControlMessage | None]]:
        """Wait a while for control messages after an id; None stands for one that is not valid."""
        reply = await self._redis.xread({self._control: after}, block=BLOCK_MS)
        return [
            (entry_id, _control_message(fields))
            for _, entries in reply
            for entry_id, fields in entries
        ]

    async def pull(self, base_model: str, count: int) -> list[Pulled]:
        """Take requests from the fair queue into the inbox, under a new lease each.

        There may be more than `count`, but only abandoned requests in addition. After a lost reply,
        which makes the client ask again, more may have been taken: `inbox` names them, and
        `read_pending` returns them. If nothing was pulled, a wake-up follows when there is work.
        """
        reply = await self._run(
            "pull",
            [
                fair_queue.queue_key(self._pool, base_model),
                self._inbox,
                fair_queue.residents_key(self._pool, self._worker_id),
            ],
            [
                *(self._pool, self._worker_id, self._boot_id),
                *(min(count, fair_queue.PULL_COUNT), protocol.INBOX_GROUP),
            ],
        )
        return [
            Pulled(
                entry_id=entry_id,
                payload=payload,
                dispatch=Dispatch(
                    state="queued", lease=lease, attempt=attempt, is_cancelled=bool(is_cancelled)
                ),
            )
            for entry_id, payload, lease, attempt, is_cancelled in reply
        ]

    async def inbox(self) -> set[bytes]:
        """Return the requests that this worker has taken and not finished, as Redis knows them."""
        entries = await self._redis.xpending_range(
            self._inbox, protocol.INBOX_GROUP, "-", "+", INBOX_COUNT
        )
        return {entry["message_id"] for entry in entries}

    async def read_pending(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield, in batches, what an earlier run of this worker took and did not finish."""
        after: bytes | str = "0"
        while entries := await self._read_group(after, count=READ_COUNT):
            yield entries
            after = entries[-1][0]

    async def _read_group(self, after: bytes | str, *, count: int) -> list[tuple[bytes, bytes]]:
        try:
            reply = await self._redis.xreadgroup(
                protocol.INBOX_GROUP,
                self._worker_id,
                {self._inbox: after},
                count=count,
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.prepare()  # Redis lost its data
            return []
        return [
            (entry_id, (fields or {}).get(protocol.PAYLOAD_FIELD, b""))
            for _, entries in reply
            for entry_id, fields in entries
        ]

    async def begin(self, requests: Sequence[tuple[bytes, str]]) -> list[Dispatch]:
        """Take up what an earlier run left, as (inbox entry, request id), under new leases.

        Requests that this run itself took keep their leases.
        """
        worker = protocol.worker_key(self._pool, self._worker_id)
        pipe = self._redis.pipeline(transaction=False)
        for entry_id, request_id in requests:
            job = protocol.job_key(self._pool, request_id)
            args: list[Any] = [self._worker_id, self._boot_id, entry_id]
            await self._scripts["begin"]([job, self._inbox, worker], args, client=pipe)
        return [_dispatch(reply) for reply in await pipe.execute()]

    async def publish(self, gateway_id: str, news: Sequence[EventUpdate]) -> list[EventUpdate]:
        """Send one gateway its events, and finish the requests that ended, in one step.

        More than MAX_ENTRY_BYTES are sent in several steps, one after the other. Returns the
        updates that were refused because another lease is current.
        """
        events = [item.event.encode() for item in news]
        refused: list[EventUpdate] = []
        for begin, end in _stretches([len(event) for event in events]):
            part = news[begin:end]
            stale = await self._publish(gateway_id, part, events[begin:end])
            refused += [part[index] for index in stale]
        return refused

    async def _publish(
        self, gateway_id: str, news: Sequence[EventUpdate], events: Sequence[bytes]
    ) -> list[int]:
        keys = [
            protocol.out_key(gateway_id),
            protocol.done_key(self._pool),
            self._inbox,
            *(protocol.job_key(self._pool, item.event.request_id) for item in news),
        ]
        args: list[Any] = [
            protocol.INBOX_GROUP,
            protocol.OUT_STREAM_MAX_LEN,
            reply_streams.out_ttl_s(gateway_id),
            protocol.DONE_JOB_TTL_S,
        ]
        for item, event in zip(news, events, strict=True):
            args += [item.event.lease, item.event.seq, event]
            args += [item.emitted, item.prompt_tokens, item.cached_tokens]
            args += [item.done.encode() if item.done else b"", item.entry_id]
        stale: list[int] = await self._run("publish", keys, args)
        return stale

    async def requeue(
        self, request_id: str, lease: int, entry_id: bytes, *, is_suspect: bool = False
    ) -> None:
        """Put a request that delivered nothing back at the front of its queue.

        is_suspect  it may have crashed the engine, so its attempt counts
        """
        await self._run(
            "requeue",
            [protocol.job_key(self._pool, request_id), self._inbox],
            [lease, self._pool, entry_id, protocol.INBOX_GROUP, int(is_suspect)],
        )

    async def mark_poison(self, request_id: str, lease: int) -> None:
        """Note that a request has crashed the engine again; its end makes it a dead letter."""
        job = protocol.job_key(self._pool, request_id)
        await self._run("mark_poison", [job], [lease, protocol.MAX_ATTEMPTS + 1])

    async def will_run_alone(self, request_id: str, lease: int) -> bool:
        """Note that a request runs alone after a crash; return whether its lease is still held."""
        return bool(
            await self._run("run_alone", [protocol.job_key(self._pool, request_id)], [lease])
        )

    async def acknowledge(self, entry_id: bytes) -> None:
        """Remove from the inbox an entry whose request has ended in another way."""
        async with self._redis.pipeline() as pipe:
            pipe.xack(self._inbox, protocol.INBOX_GROUP, entry_id)
            pipe.xdel(self._inbox, entry_id)
            await pipe.execute()

    async def dead_letter(self, entry_id: bytes, payload: bytes, reason: str) -> None:
        """Move an entry that cannot be decoded to the dead letters."""
        await self._redis.xadd(
            protocol.dead_letter_key(self._pool),
            {protocol.PAYLOAD_FIELD: payload, b"source": self._inbox, b"reason": reason},
            maxlen=protocol.DEAD_LETTER_MAX_LEN,
        )
        await self.acknowledge(entry_id)

    async def beat(self, heartbeat: Heartbeat) -> dict[str, float]:
        """Send this worker's heartbeat; return gateway id -> seconds since its heartbeat.

        Raises Replaced if a later run has sent a heartbeat under the same id.
        """
        reply = await self._run(
            "worker_beat",
            [
                protocol.workers_key(self._pool),
                protocol.worker_key(self._pool, self._worker_id),
                protocol.GATEWAYS_KEY,
                fair_queue.residents_key(self._pool, self._worker_id),
            ],
            [
                *(self._worker_id, self._boot_id, int(not self._has_come)),
                *(heartbeat.encode(), protocol.WORKER_TTL_S),
                *heartbeat.resident_digests,
            ],
        )
        if not reply:
            raise Replaced
        self._has_come = True
        now = float(reply[0])
        return {
            gateway_id.decode(): now - float(score)
            for gateway_id, score in zip(reply[1::2], reply[2::2], strict=True)
        }

    async def server_run(self) -> str:
        """Return the id of this run of Redis; empty if Redis does not give it."""
        try:
            return str((await self._redis.info("server")).get("run_id", ""))
        except ResponseError:
            return ""

    async def unregister(self) -> None:
        """Note that this worker stops on purpose."""
        await self._run(
            "unregister",
            [
                protocol.workers_key(self._pool),
                protocol.worker_key(self._pool, self._worker_id),
                fair_queue.residents_key(self._pool, self._worker_id),
                self._control,
            ],
            [self._worker_id, self._boot_id],
        )

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._scripts[script](keys, args)


def _stretches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of runs of events of at most MAX_ENTRY_BYTES, or of one longer event."""
    begin = total = 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > MAX_ENTRY_BYTES:
            yield begin, index
            begin, total = index, 0
        total += size
    yield begin, len(sizes)


def _control_message(fields: dict[bytes, bytes]) -> ControlMessage | None:
    try:
        return ControlMessage.decode(fields[protocol.PAYLOAD_FIELD])
    except (ValueError, TypeError, KeyError, AttributeError):
        log.exception("an entry of the control stream cannot be read")
        return None


def _dispatch(reply: list[bytes | None]) -> Dispatch:
    state = (reply[0] or b"").decode()
    if len(reply) == 1:
        return Dispatch(state=state)
    lease, attempt, emitted, prompt, cached, cancel = (int(value or 0) for value in reply[1:])
    return Dispatch(
        state=state,
        lease=lease,
        attempt=attempt,
        emitted=emitted,
        prompt_tokens=prompt,
        cached_tokens=cached,
        is_cancelled=bool(cancel),
    )
