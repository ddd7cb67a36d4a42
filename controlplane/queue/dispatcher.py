"""The control plane's side of the worker protocol.

One `Dispatcher` per event loop, that is per gateway process: it has each job accepted into the fair
queue, reads the one stream of events that workers write for this gateway, and hands each event to
the request it belongs to. What the keys mean is in `contract.messages.protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import redis.asyncio
from django.conf import settings
from redis.backoff import ExponentialBackoff

from contract.messages import protocol
from contract.messages.protocol import Control, ControlMessage, GenerateJob
from contract.queue.redis_uptime import RedisUptime
from controlplane.errors import Unavailable
from controlplane.infra.outages import REDIS_OUTAGE
from controlplane.infra.redis_client import AsyncCountingRetry
from controlplane.queue.admission import refusal_error
from controlplane.queue.admitting import Admitter
from controlplane.queue.batch_reply_stream import BatchReplyStream, Fenced
from controlplane.queue.known_workers import KnownWorkers
from controlplane.queue.open_replies import OpenReplies
from controlplane.queue.reaper import INTERVAL_S as REAP_INTERVAL_S
from controlplane.queue.reaper import Reaper
from controlplane.queue.replies import Reply
from controlplane.queue.reply_reader import BLOCK_MS, RETRY_S, ReplyReader
from controlplane.requestlog.recorder import Recorder
from controlplane.tenancy.epochs import EpochReader
from controlplane.usage.limits.admit import CANCEL, NO_LIMITS, Admitted, Limits, Refusal

log = logging.getLogger(__name__)
_T = TypeVar("_T")

CANCEL_RETRY_S = 1.0


class Dispatcher:
    """Owns this process's connections to the queue and the loops over them.

    workers   what is known of the pool's workers
    replies   the requests that were accepted here and are not yet answered
    recorder  the request log
    epochs    tells whether what was read of the database still holds
    """

    def __init__(self, redis_url: str, pool: str) -> None:
        self.gateway_id = f"gw-{uuid.uuid4().hex[:12]}"
        self._redis_url = redis_url
        self._pool = pool
        # Any: the client's own types cover every protocol version at once.
        self._redis: Any = redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                redis_url,
                max_connections=16,
                timeout=5,
                protocol=2,  # XREAD answers with pairs; under RESP3 with a map
                socket_connect_timeout=5,
                socket_timeout=5 + BLOCK_MS / 1000,
                retry=AsyncCountingRetry(ExponentialBackoff(cap=0.5, base=0.05), 3),
            )
        )
        self._cancel = self._redis.register_script(CANCEL)
        self._redis_uptime = RedisUptime()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.recorder = Recorder()
        self.workers = KnownWorkers(self._redis, pool)
        self.replies = OpenReplies(self._redis, pool, self.workers, self.recorder, self.cancel)
        self._admitter = Admitter(self._redis, pool, self.workers)
        self._reply_reader = ReplyReader(self._redis, self.gateway_id, self.replies.deliver)
        self.epochs = EpochReader(self._redis)

    async def start(self) -> None:
        """Announce this gateway; workers cancel the jobs of one that they do not know."""
        await self._reply_reader.say_alive()
        await self.workers.refresh()
        await self.epochs.read()
        own = (self._reply_reader.read_loop, self._beat_loop, self._reap_loop)
        for loop in (*own, self.workers.refresh_loop, self.recorder.run, self.epochs.run):
            self._spawn(_keep_up(loop))

    async def close(self) -> None:
        """Unregister the gateway; workers stop what still runs for it."""
        while tasks := list(self._tasks):  # a cancellation may get lost: see `shielded`
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CANCEL_RETRY_S)
        await self.recorder.close()
        with contextlib.suppress(*REDIS_OUTAGE):
            await self._redis.zrem(protocol.GATEWAYS_KEY, self.gateway_id)
        await self._redis.aclose()

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextlib.asynccontextmanager
    async def batch_stream(
        self, batch_id: uuid.UUID, fence: int
    ) -> AsyncIterator[BatchReplyStream]:
        """Open a batch's reply stream and read it inside the block. Raises Fenced, Unavailable."""
        batch_stream = BatchReplyStream(self._redis, self._pool, batch_id, fence)
        await batch_stream.open()
        await self._reply_reader.add(batch_stream)
        try:
            yield batch_stream
        finally:
            self._reply_reader.remove(batch_stream)

    async def submit(
        self,
        job: GenerateJob,
        limits: Limits = NO_LIMITS,
        *,
        context_length: int = 0,
        batch_stream: BatchReplyStream | None = None,
    ) -> tuple[Reply, Admitted]:
        """Have a job accepted. Whoever gets the reply must leave it in the end (`replies.leave`).

        batch_stream  where the job is answered: it keeps running when its reply is left, and one
                      that is under way there is not sent again
        Raises RateLimited when the tenant's limits refuse it, Unavailable when no worker serves
        the base model, too much is waiting, or the queue does not answer; Fenced.
        """
        if batch_stream is not None and batch_stream.is_under_way(job.request_id):
            reply = self.replies.expect(job, batch_stream)
            reply.note_accepted()
            return reply, Admitted()
        await self.workers.check_served(job.base_model)
        reply = self.replies.expect(job, batch_stream)
        # Shielded: if it were cut off half-way, the cancellation could overtake the job.
        sending = self._spawn(self._admitter.admit(job, limits, context_length, batch_stream))
        try:
            verdict = await asyncio.shield(sending)
        except REDIS_OUTAGE as error:
            self.replies.leave(reply)  # it may have arrived all the same
            raise Unavailable("The queue does not answer.") from error
        except asyncio.CancelledError:
            sending.add_done_callback(lambda _: self.replies.leave(reply))
            raise
        except BaseException:
            self.replies.drop(reply)
            raise
        if isinstance(verdict, Refusal):
            self.replies.drop(reply)
            raise Fenced if verdict.reason == "fenced" else refusal_error(verdict, limits)
        reply.note_accepted()
        if batch_stream is not None:
            batch_stream.note_admitted(job.request_id)
        return reply, verdict

    def cancel(self, request_id: str) -> asyncio.Task[None]:
        """Cancel a request; one that has ended stays as it is."""
        return self._spawn(self._send_cancel(request_id))

    async def _send_cancel(self, request_id: str) -> None:
        """Send the cancellation, again while Redis is away."""
        message = ControlMessage(action=Control.CANCEL, request_id=request_id)
        while True:
            try:
                await self._cancel(
                    keys=[protocol.job_key(self._pool, request_id)],
                    args=[self._pool, message.encode()],
                )
                return
            except REDIS_OUTAGE as error:
                log.warning("could not cancel %s yet: %r", request_id, error)
                await asyncio.sleep(CANCEL_RETRY_S)

    async def _beat_loop(self) -> None:
        while True:
            await asyncio.sleep(protocol.HEARTBEAT_INTERVAL_S)
            with contextlib.suppress(*REDIS_OUTAGE):
                await self._reply_reader.say_alive()
                self._redis_uptime.note()
                if self._redis_uptime.is_steady:
                    await self.replies.find_lost()

    async def _reap_loop(self) -> None:
        """Reap now and then. Any process may: a client that waits has a gateway at least."""
        reaper = Reaper(self._redis_url, self._pool)
        try:
            while True:
                await asyncio.sleep(REAP_INTERVAL_S)
                await asyncio.to_thread(reaper.turn_if_due)
        finally:
            reaper.close()


async def _keep_up(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop for ever; log an unexpected error and begin again.

    Without the loop the gateway would keep running but receive nothing."""
    while True:
        try:
            await loop()
        except Exception:
            log.exception("a loop of the dispatcher failed; it begins again")
        await asyncio.sleep(RETRY_S)


_dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Dispatcher]] = (
    weakref.WeakKeyDictionary()
)


async def get_dispatcher() -> Dispatcher:
    """Return this event loop's dispatcher, started on first use.

    Raises Unavailable when Redis does not answer.
    """
    loop = asyncio.get_running_loop()
    future = _dispatchers.get(loop)
    if future is None:
        # In an empty context: the request that starts it has ids and a tenant of its own.
        future = loop.create_task(_start(), context=contextvars.Context())
        _dispatchers[loop] = future
    try:
        return await asyncio.shield(future)
    except REDIS_OUTAGE as error:
        if _dispatchers.get(loop) is future:
            del _dispatchers[loop]  # the next request tries again
        raise Unavailable("The queue does not answer.") from error


def running_dispatcher() -> Dispatcher | None:
    """Return this event loop's dispatcher, if it runs."""
    future = _dispatchers.get(asyncio.get_running_loop())
    if future is None or not future.done() or future.exception() is not None:
        return None
    return future.result()


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
    running = running_dispatcher()
    _dispatchers.pop(asyncio.get_running_loop(), None)
    if running is not None:
        await running.close()
