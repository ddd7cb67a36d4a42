"""The control plane's side of the worker protocol.

One `Dispatcher` per event loop, that is per gateway process: it has each job accepted into the fair
queue, reads the one stream of events that workers write for this gateway, and hands each event to
the request it belongs to. What the keys mean is in `contract.protocol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import redis.asyncio
import structlog
from django.conf import settings
from redis.backoff import ExponentialBackoff

from contract import protocol
from contract.contact import Contact
from contract.protocol import Control, ControlMessage, ErrorCode, GenerateJob, TokenEvent
from contract.queue import fair_queue
from controlplane.errors import ApiError, Unavailable
from controlplane.infra.outages import REDIS_OUTAGE
from controlplane.infra.redis_client import AsyncCountingRetry
from controlplane.infra.threads import query_in_thread
from controlplane.limits.admit import (
    ADMIT,
    CANCEL,
    NO_LIMITS,
    SEED,
    Admitted,
    BudgetPeriod,
    Limits,
    Refusal,
    budget_state_key,
    read_verdict,
)
from controlplane.limits.services import tokens_spent
from controlplane.queue.admission import admission_args, refusal_error
from controlplane.queue.batch_reply_stream import (
    ADMIT_LINE,
    BatchReplyStream,
    Fenced,
    shielded,
)
from controlplane.queue.reaper import INTERVAL_S as REAP_INTERVAL_S
from controlplane.queue.reaper import Reaper
from controlplane.queue.replies import Reply
from controlplane.queue.reply_reader import BLOCK_MS, RETRY_S, ReplyReader
from controlplane.queue.workers import (
    Speed,
    WorkerStatus,
    is_served,
    read_statuses,
    served_models,
)
from controlplane.requestlog.recorder import Recorder
from controlplane.tenancy.epochs import EpochReader

log = logging.getLogger(__name__)
_T = TypeVar("_T")

CANCEL_RETRY_S = 1.0
WORKERS_REFRESH_S = 1.0
#: A request without news for this long is looked up in Redis.
SILENCE_S = 5.0
#: How long a budget's state outlives its period, for requests that still run.
BUDGET_TTL_S = 2 * 24 * 3600


class Dispatcher:
    """Owns the requests that this process has accepted and not yet answered."""

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
        self._admit_script = self._redis.register_script(ADMIT)
        self._admit_line = self._redis.register_script(ADMIT_LINE)
        self._seed = self._redis.register_script(SEED)
        self._cancel = self._redis.register_script(CANCEL)
        self._replies: dict[str, Reply] = {}
        self._workers: list[WorkerStatus] = []
        self._speed = Speed()
        self._contact = Contact()
        self._reply_reader = ReplyReader(self._redis, self.gateway_id, self._deliver)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.recorder = Recorder()
        self.epochs = EpochReader(self._redis)

    async def start(self) -> None:
        """Announce this gateway; workers cancel the jobs of one that they do not know."""
        await self._reply_reader.say_alive()
        await self._refresh_workers()
        await self.epochs.read()
        loops = (self._reply_reader.read_loop, self._beat_loop, self._refresh_loop, self._reap_loop)
        for loop in (*loops, self.recorder.run, self.epochs.run):
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

    @property
    def known_workers(self) -> list[WorkerStatus]:
        """The pool's workers, as of about a second ago."""
        return self._workers

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextlib.asynccontextmanager
    async def batch_stream(
        self, batch_id: uuid.UUID, fence: int
    ) -> AsyncIterator[BatchReplyStream]:
        """Open a batch's reply stream and read it meanwhile. Raises Fenced, and Unavailable."""
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
        """Have a job accepted. Whoever gets the reply must `leave` it in the end.

        batch_stream  where the job is answered: it goes on when it is left, and one that is
                      under way there is not sent again
        Raises RateLimited when the tenant's limits refuse it, Unavailable when no worker serves
        the base model, too much is waiting, or the queue does not answer; Fenced.
        """
        if batch_stream is not None and batch_stream.is_under_way(job.request_id):
            reply = self._expect(job, batch_stream)
            reply.note_accepted()
            return reply, Admitted()
        await shielded(self._check_served(job.base_model))
        reply = self._expect(job, batch_stream)
        # Shielded: if it were cut off half-way, the cancellation could overtake the job.
        sending = self._spawn(self._admit(job, limits, context_length, batch_stream))
        try:
            verdict = await asyncio.shield(sending)
        except REDIS_OUTAGE as error:
            self.leave(reply)  # it may have arrived all the same
            raise Unavailable("The queue does not answer.") from error
        except asyncio.CancelledError:
            sending.add_done_callback(lambda _: self.leave(reply))
            raise
        except BaseException:
            del self._replies[job.request_id]
            raise
        if isinstance(verdict, Refusal):
            del self._replies[job.request_id]
            raise Fenced if verdict.reason == "fenced" else refusal_error(verdict, limits)
        reply.note_accepted()
        if batch_stream is not None:
            batch_stream.note_admitted(job.request_id)
        return reply, verdict

    def _expect(self, job: GenerateJob, batch_stream: BatchReplyStream | None) -> Reply:
        """Make the job's reply, with the events so far; later ones are delivered to it."""
        reply = self._replies[job.request_id] = Reply(job, self.recorder.open(job))
        for event in batch_stream.news(job.request_id) if batch_stream is not None else ():
            self._deliver(event)
        return reply

    async def _admit(
        self,
        job: GenerateJob,
        limits: Limits,
        context_length: int,
        batch_stream: BatchReplyStream | None,
    ) -> Admitted | Refusal:
        args = admission_args(
            job,
            self._pool,
            limits,
            tokens_per_s=self._speed.tokens_per_s(job.base_model),
            context_length=context_length,
        )
        keys = [protocol.job_key(self._pool, job.request_id)]
        script = self._admit_script
        if batch_stream is not None:
            more_keys, more_args = batch_stream.admission(job)
            script, keys, args = self._admit_line, keys + more_keys, more_args + args
        while True:
            reply = await script(keys=keys, args=args)
            verdict = read_verdict(reply, limits)
            if not isinstance(verdict, Refusal) or verdict.reason != "unknown":
                return verdict
            await self._seed_budget(job.tenant_id, limits.budgets[verdict.index - 1])

    async def _seed_budget(self, tenant_id: str, budget: BudgetPeriod) -> None:
        """Tell Redis what the database knows of a budget that it does not know.

        Raises Unavailable.
        """
        spent = await query_in_thread(lambda: tokens_spent(tenant_id, budget))
        await self._seed(
            keys=[budget_state_key(self._pool, tenant_id, budget)],
            args=[spent, int(budget.ends_at) + BUDGET_TTL_S],
        )

    async def _check_served(self, base_model: str) -> None:
        """Raise Unavailable unless a worker serves the base model, or may again soon."""
        if not is_served(self._workers, base_model):  # perhaps it has only just come
            with contextlib.suppress(*REDIS_OUTAGE):
                await self._refresh_workers()
            if not is_served(self._workers, base_model) and not await self._may_return(base_model):
                raise Unavailable(f"No worker serves {base_model} now.", retry_after_s=5)

    async def _may_return(self, base_model: str) -> bool:
        """Whether a worker of it left so lately that requests may wait for the next one."""
        pipe = self._redis.pipeline(transaction=False)
        queue = fair_queue.queue_key(self._pool, base_model)
        pipe.time().zscore(fair_queue.served_key(self._pool), queue)
        try:
            (seconds, _), heard = await pipe.execute()
        except REDIS_OUTAGE:
            return False
        return heard is not None and seconds - heard < protocol.WORKER_GRACE_S

    async def served_models(self) -> set[str]:
        """Return the base models that requests are accepted for."""
        if not (served := served_models(self._workers)):  # perhaps the first has only just come
            with contextlib.suppress(*REDIS_OUTAGE):
                await self._refresh_workers()
            served = served_models(self._workers)
        return served

    def devices(self, base_model: str) -> set[str]:
        """Return the devices that the workers of a base model run on."""
        beats = (worker.heartbeat for worker in self._workers)
        return {beat.device for beat in beats if beat.base_model == base_model}

    def leave(self, reply: Reply) -> None:
        """Be done with a reply. One that has not ended is cancelled, unless it goes on without
        its client."""
        if self._replies.get(reply.request_id) is not reply:
            return  # left already, or another reply waits for the request now
        del self._replies[reply.request_id]
        if not reply.is_ended and not reply.goes_on:
            reply.abandon()
            self.cancel(reply.request_id)

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
                    args=[
                        message.encode(),
                        protocol.CONTROL_STREAM_MAX_LEN,
                        protocol.control_key(self._pool, ""),
                        protocol.DONE_JOB_TTL_S,
                    ],
                )
                return
            except REDIS_OUTAGE as error:
                log.warning("could not cancel %s yet: %r", request_id, error)
                await asyncio.sleep(CANCEL_RETRY_S)

    def _deliver(self, event: TokenEvent) -> None:
        """Hand an event to the request it belongs to."""
        reply = self._replies.get(event.request_id)
        if reply is None:
            return  # its client has left
        try:
            reply.push(event)
        except ApiError as error:
            self._give_up(reply, error)

    def _give_up(self, reply: Reply, error: ApiError) -> None:
        if not reply.is_forgotten:  # it would end the request that is sent in its place
            self.cancel(reply.request_id)
        reply.fail(error)

    async def _beat_loop(self) -> None:
        while True:
            await asyncio.sleep(protocol.HEARTBEAT_INTERVAL_S)
            with contextlib.suppress(*REDIS_OUTAGE):
                await self._reply_reader.say_alive()
                self._contact.note()
                if self._contact.is_steady:
                    await self._find_lost_replies()

    async def _reap_loop(self) -> None:
        """Reap now and then. Any process may: a client that waits has a gateway at least."""
        reaper = Reaper(self._redis_url, self._pool)
        try:
            while True:
                await asyncio.sleep(REAP_INTERVAL_S)
                await asyncio.to_thread(reaper.turn_if_due)
        finally:
            reaper.close()

    async def _refresh_loop(self) -> None:
        while True:
            await asyncio.sleep(WORKERS_REFRESH_S)
            with contextlib.suppress(*REDIS_OUTAGE):
                await self._refresh_workers()

    async def _refresh_workers(self) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.time().zrange(protocol.workers_key(self._pool), 0, -1, withscores=True)
        time, scores = await pipe.execute()
        for worker_id, _ in scores:
            pipe.hget(protocol.worker_key(self._pool, worker_id.decode()), protocol.PAYLOAD_FIELD)
        self._workers = read_statuses(time, scores, await pipe.execute() if scores else [])
        self._speed.observe(self._workers)

    def _known_workers(self) -> set[bytes]:
        return {
            worker.heartbeat.worker_id.encode() for worker in self._workers if worker.may_return
        }

    async def _find_lost_replies(self) -> None:
        """End the replies that no event will come for: Redis lost them, or their worker did.

        The reaper ends those that only wait for a worker.
        """
        now = asyncio.get_running_loop().time()
        silent = [
            reply
            for reply in self._replies.values()
            if reply.is_accepted and not reply.is_ended and now - reply.heard_at > SILENCE_S
        ]
        if not silent:
            return
        pipe = self._redis.pipeline(transaction=False)
        for reply in silent:
            pipe.hmget(protocol.job_key(self._pool, reply.request_id), "state", "worker")
        known = self._known_workers()
        states = await pipe.execute()
        await self._refresh_workers()  # one that took it may have come, and one may have left,
        known |= self._known_workers()  # in the meantime
        for reply, (state, worker_id) in zip(silent, states, strict=True):
            # A finished job's last event is read within moments; still silent, it is lost.
            if state is None or (state == b"done" and now - reply.heard_at > 2 * SILENCE_S):
                lost, reply.is_forgotten = "The queue lost this request.", state is None
            elif state == b"running" and worker_id not in known:
                lost = "The worker is gone."
            else:
                continue
            self._give_up(reply, Unavailable(lost, code=ErrorCode.WORKER_LOST))


async def _keep_up(loop: Callable[[], Awaitable[None]]) -> None:
    """Run a loop for ever; log an unexpected error and begin again.

    Without the loop the gateway would go on and hear nothing."""
    structlog.contextvars.clear_contextvars()  # a request may have started the dispatcher
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
        future = _dispatchers[loop] = asyncio.ensure_future(_start())
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
