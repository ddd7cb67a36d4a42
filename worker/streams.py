"""Every Redis command of a worker. What the keys mean is in `worker.protocol`.

All changes to a request go through a script that compares the lease first, so a worker that was
paused and replaced can no longer tell anything, acknowledge anything or bill anything. Each
script may be repeated after a lost reply without a second effect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import NoScriptError, ResponseError

from worker import fair_queue, mailboxes, protocol
from worker.protocol import ControlMessage, DoneRecord, Heartbeat, TokenEvent, Usage

READ_COUNT = 64
#: Beyond what a worker ever holds.
INBOX_COUNT = 4096
BLOCK_MS = 2000

# KEYS job, inbox, worker | ARGV worker, boot, inbox entry
# -> state as it was, lease, attempt, emitted, prompt, cached, cancel
BEGIN = """
if (redis.call('HGET', KEYS[3], 'boot') or ARGV[2]) ~= ARGV[2] then return {'replaced'} end
-- No longer here: this worker was taken for dead meanwhile, and the request is another's.
if #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then return {'gone'} end
local state, boot = unpack(redis.call('HMGET', KEYS[1], 'state', 'boot'))
if not state then return {'gone'} end
if state == 'done' then return {'done'} end
if boot ~= ARGV[2] then
  local attempt, alone = unpack(redis.call('HMGET', KEYS[1], 'attempt', 'alone'))
  -- One that was only waiting for its turn to run alone did not cause the crash.
  if tonumber(attempt or 0) < 2 or alone then redis.call('HINCRBY', KEYS[1], 'attempt', 1) end
  redis.call('HINCRBY', KEYS[1], 'lease', 1)
  redis.call('HDEL', KEYS[1], 'alone')
  redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[1], 'boot', ARGV[2], 'seq', 0)
end
local now = redis.call('HMGET', KEYS[1],
  'lease', 'attempt', 'emitted', 'prompt_tokens', 'cached_tokens', 'cancel')
return {state, now[1], now[2], now[3], now[4], now[5], now[6]}
"""

# KEYS job, inbox | ARGV lease, pool, inbox entry, group
HAND_BACK = (
    fair_queue.PUT_BACK
    + """
local lease, state = unpack(redis.call('HMGET', KEYS[1], 'lease', 'state'))
if lease ~= ARGV[1] or state ~= 'running' then return 0 end
redis.call('HINCRBY', KEYS[1], 'attempt', -1)
put_back(ARGV[2], KEYS[1], KEYS[2], ARGV[3], ARGV[4])
return 1
"""
)

# KEYS job | ARGV lease -> whether the lease is held
ALONE = """
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'alone', 1)
return 1
"""

# KEYS workers, worker, gateways, residents | ARGV worker id, boot, whether it comes now, heartbeat,
# ttl, digest …
# -> time, gateway, its time, …; nothing: another run came later under this id
BEAT = """
redis.replicate_commands()
local boot = redis.call('HGET', KEYS[2], 'boot')
if ARGV[3] == '0' and boot and boot ~= ARGV[2] then return {} end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('HSET', KEYS[2], 'm', ARGV[4], 'boot', ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('DEL', KEYS[4])
for i = 6, #ARGV do redis.call('SADD', KEYS[4], ARGV[i]) end
redis.call('EXPIRE', KEYS[4], ARGV[5])
local gateways = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
table.insert(gateways, 1, tostring(now))
return gateways
"""

# KEYS workers, worker, residents, control | ARGV worker id, boot
UNREGISTER = """
if (redis.call('HGET', KEYS[2], 'boot') or ARGV[2]) ~= ARGV[2] then return end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
"""

SCRIPTS = {
    "alone": ALONE,
    "beat": BEAT,
    "begin": BEGIN,
    "hand_back": HAND_BACK,
    "publish": fair_queue.PUBLISH,
    "pull": fair_queue.PULL,
    "unregister": UNREGISTER,
}


class Replaced(Exception):
    """Another run has this worker's id now: this one was paused, and thought to be dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Where a request stands as this worker takes it up; the counts are of earlier attempts."""

    #: "queued", "running" (an attempt was lost), "done", "gone", or "replaced": another run's.
    state: str
    lease: int = 0
    attempt: int = 0
    emitted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    is_cancelled: bool = False

    @property
    def usage(self) -> Usage:
        """What earlier attempts told of."""
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
class News:
    """One request's share of a flush; `done` with its last event."""

    event: TokenEvent
    entry_id: bytes
    emitted: int
    prompt_tokens: int
    cached_tokens: int
    done: DoneRecord | None = None


class Streams:
    """A worker's connection to Redis. Every method may raise redis.exceptions.RedisError."""

    def __init__(self, redis_url: str, *, pool: str, worker_id: str, boot_id: str) -> None:
        # Any: the client's own types cover every protocol version at once.
        self._redis: Any = redis.asyncio.from_url(
            redis_url,
            protocol=2,  # XREAD answers with pairs; under RESP3 with a map
            socket_connect_timeout=5,
            socket_timeout=5 + BLOCK_MS / 1000,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            health_check_interval=30,
        )
        self._pool = pool
        self._worker_id = worker_id
        self._boot_id = boot_id
        self._inbox = protocol.inbox_key(pool, worker_id)
        self._control = protocol.control_key(pool, worker_id)
        self._has_come = False  # told that it lives
        self._sha: dict[str, str] = {}

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
        """The newest control message so far; what came before the start is of no concern."""
        newest = await self._redis.xrevrange(self._control, count=1)
        return newest[0][0] if newest else b"0-0"

    async def read_control(self, after: bytes) -> list[tuple[bytes, ControlMessage]]:
        """Control messages after an id; waits a while for one."""
        reply = await self._redis.xread({self._control: after}, block=BLOCK_MS)
        return [
            (entry_id, ControlMessage.decode(fields[protocol.PAYLOAD_FIELD]))
            for _, entries in reply
            for entry_id, fields in entries
        ]

    async def pull(self, base_model: str, count: int) -> list[Pulled]:
        """Take requests from the fair queue into the inbox, under a new lease each.

        More than `count` only by such as nobody waits for any more. After a lost reply, which the
        client may have answered by asking again, more have been taken: `inbox` tells, and
        `read_pending` has them. Nothing pulled: a poke will follow as soon as there is something.
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
        """The requests that this worker has taken and not finished, as far as Redis knows."""
        entries = await self._redis.xpending_range(
            self._inbox, protocol.INBOX_GROUP, "-", "+", INBOX_COUNT
        )
        return {entry["message_id"] for entry in entries}

    async def read_pending(self) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """What an earlier run of this worker took and did not finish, in batches."""
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

        What this run itself took keeps its lease.
        """
        worker = protocol.worker_key(self._pool, self._worker_id)
        replies = await self._run_many(
            "begin",
            [
                (
                    [protocol.job_key(self._pool, request_id), self._inbox, worker],
                    [self._worker_id, self._boot_id, entry_id],
                )
                for entry_id, request_id in requests
            ],
        )
        return [_dispatch(reply) for reply in replies]

    async def publish(self, gateway_id: str, news: Sequence[News]) -> list[News]:
        """Send one gateway its events, and finish the requests that ended, in one step.

        -> the news that were refused because another lease is current.
        """
        keys = [
            protocol.out_key(gateway_id),
            protocol.done_key(self._pool),
            self._inbox,
            *(protocol.job_key(self._pool, item.event.request_id) for item in news),
        ]
        args: list[Any] = [
            protocol.INBOX_GROUP,
            protocol.OUT_STREAM_MAX_LEN,
            mailboxes.out_ttl_s(gateway_id),
            protocol.DONE_JOB_TTL_S,
        ]
        for item in news:
            args += [item.event.lease, item.event.seq, item.event.encode()]
            args += [item.emitted, item.prompt_tokens, item.cached_tokens]
            args += [item.done.encode() if item.done else b"", item.entry_id]
        stale = await self._run("publish", keys, args)
        return [news[index] for index in stale]

    async def hand_back(self, request_id: str, lease: int, entry_id: bytes) -> None:
        """Put a request that delivered nothing back, as if it had not been taken."""
        await self._run(
            "hand_back",
            [protocol.job_key(self._pool, request_id), self._inbox],
            [lease, self._pool, entry_id, protocol.INBOX_GROUP],
        )

    async def will_run_alone(self, request_id: str, lease: int) -> bool:
        """Note that a request runs apart from others that were in a crash. -> lease still held."""
        return bool(await self._run("alone", [protocol.job_key(self._pool, request_id)], [lease]))

    async def acknowledge(self, entry_id: bytes) -> None:
        """Remove an entry from the inbox whose request has ended otherwise."""
        async with self._redis.pipeline() as pipe:
            pipe.xack(self._inbox, protocol.INBOX_GROUP, entry_id)
            pipe.xdel(self._inbox, entry_id)
            await pipe.execute()

    async def bury(self, entry_id: bytes, payload: bytes, reason: str) -> None:
        """Move an entry that cannot be understood to the dead letters."""
        await self._redis.xadd(
            protocol.dead_letter_key(self._pool),
            {protocol.PAYLOAD_FIELD: payload, b"source": self._inbox, b"reason": reason},
            maxlen=protocol.DEAD_LETTER_MAX_LEN,
        )
        await self.acknowledge(entry_id)

    async def beat(self, heartbeat: Heartbeat) -> dict[str, float]:
        """Say that this worker lives. -> gateway id -> seconds since it last said so.

        Raises Replaced when a later run said so under the same id.
        """
        reply = await self._run(
            "beat",
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

    async def unregister(self) -> None:
        """Say that this worker goes on purpose."""
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

    async def _run(self, script: str, keys: list[str], args: list[Any]) -> Any:
        return (await self._run_many(script, [(keys, args)]))[0]

    async def _run_many(
        self, script: str, calls: Iterable[tuple[list[str], list[Any]]]
    ) -> list[Any]:
        calls = list(calls)
        for _ in range(2):
            if script not in self._sha:
                self._sha[script] = await self._redis.script_load(SCRIPTS[script])
            pipe = self._redis.pipeline(transaction=False)
            for keys, args in calls:
                pipe.evalsha(self._sha[script], len(keys), *keys, *args)
            try:
                return list(await pipe.execute())
            except NoScriptError:  # Redis was restarted; none of the calls took place
                del self._sha[script]
        raise NoScriptError(script)


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
