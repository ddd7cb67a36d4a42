"""The control plane's side of the worker protocol, and its only use of Redis streams.

One `Dispatcher` per event loop, that is per gateway process: it chooses a worker for each job,
reads the one stream of events that workers write for this gateway, and hands each event to the
request it belongs to. What the keys mean is in `worker.protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import weakref
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from controlplane.errors import ApiError, Unavailable
from controlplane.replies import Reply
from controlplane.workers import WorkerStatus, best_worker, read_statuses, workers
from worker import protocol
from worker.protocol import Control, ControlMessage, ErrorCode, GenerateJob

__all__ = ["Dispatcher", "WorkerStatus", "close_dispatcher", "dispatcher", "workers"]

log = logging.getLogger(__name__)
_T = TypeVar("_T")

BLOCK_MS = 2000
RETRY_S = 0.2
WORKERS_REFRESH_S = 1.0
#: A request without news for this long is looked up in Redis.
SILENCE_S = 5.0
#: Requests that may wait for one worker, whatever gateway they came through.
MAX_WAITING = 1000
#: Workers tried for one job, if each leaves in the moment it is chosen.
MAX_CHOICES = 3
# KEYS job, inbox, worker | ARGV job, worker, gateway, ttl. Repeating it changes nothing.
# -> 0 when the worker has left: what is put into its inbox then, nobody takes up.
SUBMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 1 end
if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', 'queued')
redis.call('HSET', KEYS[1], 'worker', ARGV[2], 'gateway', ARGV[3], 'lease', 0, 'seq', 0)
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[2], '*', 'm', ARGV[1])
return 1
"""

# KEYS job, control | ARGV control message, length of the control stream
CANCEL = """
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'done' then return 0 end
redis.call('HSET', KEYS[1], 'cancel', 1)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'm', ARGV[1])
return 1
"""

# KEYS gateways, out | ARGV gateway, last id read, seconds after which a dead gateway is forgotten
BEAT = """
redis.replicate_commands()
local now = redis.call('TIME')[1]
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
redis.call('XTRIM', KEYS[2], 'MINID', '~', ARGV[2])
return now
"""


class Dispatcher:
    """Owns the requests that this process has accepted and not yet answered."""

    def __init__(self, redis_url: str, pool: str) -> None:
        self.gateway_id = f"gw-{uuid.uuid4().hex[:12]}"
        self._pool = pool
        self._out = protocol.out_key(self.gateway_id)
        # Any: the client's own types cover every protocol version at once.
        self._redis: Any = redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                redis_url,
                max_connections=16,
                timeout=5,
                protocol=2,  # XREAD answers with pairs; under RESP3 with a map
                socket_connect_timeout=5,
                socket_timeout=5 + BLOCK_MS / 1000,
                retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            )
        )
        self._submit = self._redis.register_script(SUBMIT)
        self._cancel = self._redis.register_script(CANCEL)
        self._beat = self._redis.register_script(BEAT)
        self._replies: dict[str, Reply] = {}
        self._num_replies: Counter[str] = Counter()  # by worker
        self._workers: list[WorkerStatus] = []
        self._last_id: bytes = b"0-0"
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Announce this gateway; workers cancel the jobs of one that they do not know."""
        await self._say_alive()
        await self._refresh_workers()
        for loop in (self._read_loop(), self._beat_loop(), self._refresh_loop()):
            self._spawn(loop)

    async def close(self) -> None:
        """Say goodbye; workers stop what still runs for this gateway."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.zrem(protocol.GATEWAYS_KEY, self.gateway_id)
        await self._redis.aclose()

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def submit(self, job: GenerateJob) -> Reply:
        """Hand a job to a worker. Whoever gets the reply must `leave` it in the end.

        Raises Unavailable when no worker serves the base model or the queue does not answer.
        """
        for _ in range(MAX_CHOICES):
            reply = await self._submit_to(await self._choose(job), job)
            if reply is not None:
                return reply
            with contextlib.suppress(RedisError, OSError):
                await self._refresh_workers()
        raise Unavailable(f"No worker serves {job.base_model} now.", retry_after_s=5)

    async def _submit_to(self, worker_id: str, job: GenerateJob) -> Reply | None:
        """Hand the job to this worker; None, with nothing sent, when it has left."""
        reply = Reply(job, worker_id)
        self._replies[job.request_id] = reply
        self._num_replies[worker_id] += 1
        # Shielded: were it cut off half-way, a cancellation could overtake the job itself.
        sending = self._spawn(self._send_job(job, worker_id))
        try:
            if await asyncio.shield(sending):
                return reply
        except (RedisError, OSError) as error:
            self.leave(reply)  # it may have arrived all the same
            raise Unavailable("The queue does not answer.") from error
        except asyncio.CancelledError:
            sending.add_done_callback(lambda _: self.leave(reply))
            raise
        del self._replies[job.request_id]
        self._num_replies[worker_id] -= 1
        return None

    async def _send_job(self, job: GenerateJob, worker_id: str) -> bool:
        is_sent = await self._submit(
            keys=[
                protocol.job_key(self._pool, job.request_id),
                protocol.inbox_key(self._pool, worker_id),
                protocol.worker_key(self._pool, worker_id),
            ],
            args=[job.encode(), worker_id, self.gateway_id, protocol.JOB_TTL_S],
        )
        return bool(is_sent)

    def leave(self, reply: Reply) -> None:
        """Be done with a reply; if it has not ended, its generation is cancelled."""
        if self._replies.pop(reply.request_id, None) is None:
            return
        self._num_replies[reply.worker_id] -= 1
        if not reply.is_ended:
            self._spawn(self._send_cancel(reply))

    async def _send_cancel(self, reply: Reply) -> None:
        message = ControlMessage(action=Control.CANCEL, request_id=reply.request_id)
        try:
            await self._cancel(
                keys=[
                    protocol.job_key(self._pool, reply.request_id),
                    protocol.control_key(self._pool, reply.worker_id),
                ],
                args=[message.encode(), protocol.CONTROL_STREAM_MAX_LEN],
            )
        except (RedisError, OSError) as error:
            log.warning("could not cancel %s: %r", reply.request_id, error)

    async def _choose(self, job: GenerateJob) -> str:
        chosen = best_worker(self._workers, job, self._load)
        if chosen is None:  # perhaps it has only just come
            with contextlib.suppress(RedisError, OSError):
                await self._refresh_workers()
            chosen = best_worker(self._workers, job, self._load)
        if chosen is None:
            raise Unavailable(f"No worker serves {job.base_model} now.", retry_after_s=5)
        if self._load(chosen) >= MAX_WAITING:
            raise Unavailable("Too many requests are waiting.", retry_after_s=10)
        return chosen.heartbeat.worker_id

    def _load(self, worker: WorkerStatus) -> int:
        """Its requests: as it said at its last heartbeat, or more if this gateway sent more."""
        heartbeat = worker.heartbeat
        return max(heartbeat.running + heartbeat.waiting, self._num_replies[heartbeat.worker_id])

    async def _read_loop(self) -> None:
        """Deliver events for ever. The last id read makes a reconnection lose nothing."""
        while True:
            try:
                entries = await self._redis.xread({self._out: self._last_id}, block=BLOCK_MS)
            except (RedisError, OSError) as error:
                log.warning("waiting for Redis: %r", error)
                await asyncio.sleep(RETRY_S)
                continue
            for _, batch in entries:
                for entry_id, fields in batch:
                    self._last_id = entry_id
                    self._deliver(fields[protocol.PAYLOAD_FIELD])

    def _deliver(self, payload: bytes) -> None:
        try:
            events = protocol.unpack_events(payload)
        except (ValueError, TypeError, KeyError, AttributeError):
            log.exception("an entry of the event stream cannot be read")
            return
        for event in events:
            reply = self._replies.get(event.request_id)
            if reply is None:
                continue  # its client has left
            try:
                reply.push(event)
            except ApiError as error:
                self._give_up(reply, error)

    def _give_up(self, reply: Reply, error: ApiError) -> None:
        self._spawn(self._send_cancel(reply))
        reply.fail(error)

    async def _beat_loop(self) -> None:
        while True:
            await asyncio.sleep(protocol.HEARTBEAT_INTERVAL_S)
            with contextlib.suppress(RedisError, OSError):
                await self._say_alive()
                await self._find_lost_replies()

    async def _say_alive(self) -> None:
        await self._beat(
            keys=[protocol.GATEWAYS_KEY, self._out], args=[self.gateway_id, self._last_id, 3600]
        )

    async def _refresh_loop(self) -> None:
        while True:
            await asyncio.sleep(WORKERS_REFRESH_S)
            with contextlib.suppress(RedisError, OSError):
                await self._refresh_workers()

    async def _refresh_workers(self) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.time().zrange(protocol.workers_key(self._pool), 0, -1, withscores=True)
        time, scores = await pipe.execute()
        for worker_id, _ in scores:
            pipe.hget(protocol.worker_key(self._pool, worker_id.decode()), "m")
        self._workers = read_statuses(time, scores, await pipe.execute() if scores else [])

    async def _find_lost_replies(self) -> None:
        """End the replies that nothing will come for: Redis forgot them, or their worker did."""
        now = asyncio.get_running_loop().time()
        silent = [
            reply
            for reply in self._replies.values()
            if not reply.is_ended and now - reply.heard_at > SILENCE_S
        ]
        if not silent:
            return
        pipe = self._redis.pipeline(transaction=False)
        for reply in silent:
            pipe.hget(protocol.job_key(self._pool, reply.request_id), "state")
        states = await pipe.execute()
        known = {worker.heartbeat.worker_id for worker in self._workers if worker.may_return}
        for reply, state in zip(silent, states, strict=True):
            # A finished job's last event is read within moments; still silent, it is lost.
            if state is None or (state == b"done" and now - reply.heard_at > 2 * SILENCE_S):
                error = Unavailable("The queue lost this request.", code=ErrorCode.WORKER_LOST)
                self._give_up(reply, error)
            elif reply.worker_id not in known:
                error = Unavailable("The worker is gone.", code=ErrorCode.WORKER_LOST)
                self._give_up(reply, error)


_dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Dispatcher]] = (
    weakref.WeakKeyDictionary()
)


async def dispatcher() -> Dispatcher:
    """This event loop's dispatcher, started on first use.

    Raises Unavailable when Redis does not answer.
    """
    loop = asyncio.get_running_loop()
    future = _dispatchers.get(loop)
    if future is None:
        future = _dispatchers[loop] = asyncio.ensure_future(_start())
    try:
        return await asyncio.shield(future)
    except (RedisError, OSError) as error:
        if _dispatchers.get(loop) is future:
            del _dispatchers[loop]  # the next request tries again
        raise Unavailable("The queue does not answer.") from error


async def _start() -> Dispatcher:
    started = Dispatcher(settings.REDIS_URL, settings.POOL)
    try:
        await started.start()
    except BaseException:
        await started.close()
        raise
    return started


async def close_dispatcher() -> None:
    """Stop this event loop's dispatcher, if there is one."""
    future = _dispatchers.pop(asyncio.get_running_loop(), None)
    if future is not None and future.done() and future.exception() is None:
        await future.result().close()
