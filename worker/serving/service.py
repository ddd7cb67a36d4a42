"""Worker: the worker's IO process, with its loops, its heartbeat, its start and its end.

If this process is killed, its requests stay in the inbox, where the next run under the same worker
id finds them (`_recover`). If the engine process dies, this one ends too, but first gives its
requests back (`_give_requests_back`), so that other workers have them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import RedisError

from contract.adapters.probe_server import PortTaken
from contract.messages.protocol import HEARTBEAT_INTERVAL_S, Control, GenerateJob, Heartbeat
from contract.messages.worker_messages import MAX_TOLD, told
from contract.process.alive_file import AliveFile
from contract.queue.redis_uptime import RedisUptime
from engine.request import digests_of
from engine.stats import EngineStats
from worker.config import WorkerConfig
from worker.engine_process.channel import StepReport
from worker.engine_process.link import EngineLink
from worker.engine_process.precision import tell
from worker.serving.adapter_cache import Fetch, S3Fetch
from worker.serving.drain import Drain
from worker.serving.metrics import WorkerMetrics, WorkerState
from worker.serving.requests import LOST, Requests
from worker.serving.streams import Replaced, Streams
from worker.serving.tasks import Tasks

if TYPE_CHECKING:
    from worker.engine_process.process import EngineFactory

log = logging.getLogger(__name__)

RETRY_S = 0.5
DRAIN_POLL_S = 0.05
#: Seconds between two looks of a worker with room for work, in case a wake-up was lost.
IDLE_POLL_S = 1.0
#: Seconds between two checks of the inbox for requests that the worker does not know.
INBOX_CHECK_S = 2.0
#: Seconds that a worker whose engine has died has to give its requests back.
PARTING_S = 5.0

_T = TypeVar("_T")


def run(
    config: WorkerConfig,
    *,
    engine_factory: EngineFactory | None = None,
    fetch: Fetch | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; return the process's exit status.

    engine_factory  a module-level function; None: the real engine
    fetch           where adapters come from; None: the object store
    """
    try:
        return asyncio.run(_serve(config, engine_factory, fetch))
    except PortTaken as error:
        log.error("%s", error)
        return 2


async def _serve(
    config: WorkerConfig, engine_factory: EngineFactory | None, fetch: Fetch | None
) -> int:
    worker = Worker(config, engine_factory, fetch or S3Fetch(config.s3))
    if config.metrics_port:
        worker.serve_metrics((config.metrics_address, config.metrics_port))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    return await worker.run()


class _Outcome(enum.Enum):
    """The reason why a run ends."""

    DRAINED = "drained"
    CUT = "cut short"  # stopped twice, or replaced: requests are left as they are
    LOST = "the engine is lost"  # or stuck
    FAILED = "failed"  # an unexpected error in this process


class Worker:
    """One run of a worker. Owns the engine process and the loops that feed it."""

    def __init__(
        self, config: WorkerConfig, engine_factory: EngineFactory | None, fetch: Fetch
    ) -> None:
        self._config = config
        self._boot_id = uuid.uuid4().hex
        self._started_at = time.time()
        self._link = EngineLink(config, engine_factory)
        self._streams = Streams(
            config.redis_url, pool=config.pool, worker_id=config.worker_id, boot_id=self._boot_id
        )
        self._tasks = Tasks(self._fail)
        self._metrics = WorkerMetrics(self._state)
        self._requests = Requests(
            config,
            self._streams,
            send=self._link.send,
            fetch=fetch,
            tasks=self._tasks,
            on_end=self._metrics.note_end,
        )
        # Tests with another engine seldom need grammars.
        self._prepares_helpers = engine_factory is None
        self._stats = EngineStats()
        self._redis_uptime = RedisUptime()
        self._turned_at = self._heard_at = time.monotonic()
        self._alive = AliveFile(config.alive_file)
        self._heartbeat_lock = asyncio.Lock()  # held while a heartbeat or the departure is sent
        self._has_left = False
        self._tokens_per_s = 0.0
        self._is_loaded = asyncio.Event()
        self._drains = Drain()
        self._woken = asyncio.Event()
        self._end = asyncio.Event()
        self._outcome: _Outcome | None = None

    def serve_metrics(self, address: tuple[str, int]) -> None:
        """Serve /metrics, /healthz and /readyz from a thread. Raises PortTaken."""
        self._metrics.serve(address)

    def _state(self) -> WorkerState:
        return WorkerState(
            stats=self._stats,
            is_loaded=self._is_loaded.is_set(),
            is_draining=self._drains.is_on,
            silent_s=time.monotonic() - self._turned_at,
            heard_s=time.monotonic() - self._heard_at,
            downloads=self._requests.adapters.downloads,
            prefetches=self._requests.prefetches.outcomes,
            prefix_pins=self._requests.prefix_pins.outcomes,
            trials=self._requests.grammars.trials,
            redis_errors=self._streams.num_errors,
        )

    def drain(self) -> None:
        """Take no more work, finish what runs, then stop. A second call stops at once."""
        if self._drains.is_on or not self._is_loaded.is_set():
            self._stop(_Outcome.CUT)
        self._stop_pulling(is_final=True)

    def _stop(self, outcome: _Outcome) -> None:
        """End the run; the first outcome stays."""
        self._outcome = self._outcome or outcome
        self._end.set()

    def _fail(self, error: BaseException) -> None:
        log.error("the worker ends: %r", error, exc_info=error)
        self._stop(_Outcome.FAILED)

    def _stop_pulling(self, *, is_final: bool) -> None:
        self._drains.begin(is_final=is_final)
        self._woken.set()

    async def run(self) -> int:
        """Serve until drained; return 0, or 1 if the engine died or the drain was cut short."""
        self._link.start(self._on_report, lambda: self._stop(_Outcome.LOST))
        try:
            self._tasks.start(self._serve())
            self._tasks.start(self._drain())
            await self._end.wait()
            if self._outcome in (_Outcome.LOST, _Outcome.FAILED):
                parting = self._tasks.start(self._give_requests_back())
                await asyncio.wait({parting}, timeout=PARTING_S)
        finally:
            await self._tasks.end()
            self._link.stop()
            self._requests.grammars.stop()
            await self._streams.close()
        if self._outcome is _Outcome.DRAINED:
            return 0
        log.error("stopped short; exit code of the engine: %s", self._link.exit_code)
        return 1

    def _on_report(self, report: StepReport) -> None:
        try:
            self._is_loaded.set()
            if report.stats is not None:
                if report.stats.step != self._stats.step:
                    self._requests.note_progress()
                self._note_stats(report.stats)
            self._requests.on_outputs(report.outputs)
        except Exception as error:  # the rest of the report is lost
            self._fail(error)

    def _note_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        self._requests.adapters.note_stats(stats)
        if self._requests.prefetches.note_arrivals():
            self._tasks.start(self._beat())  # somebody may be waiting for it

    async def _serve(self) -> None:
        """Start the loops, each at its time."""
        control_id = await _with_retry(self._streams.last_control_id)
        await _with_retry(self._streams.prepare)
        for digest in await _with_retry(self._streams.deleted_adapters):
            self._requests.forget_adapter(digest)
        # From the beginning: jobs wait for a worker that is loading, however long it takes.
        self._tasks.start(self._beat_loop())
        await self._is_loaded.wait()
        log.info("the engine has loaded %s", self._config.base_model)
        await self._beat()
        if self._prepares_helpers:
            self._tasks.start(self._requests.grammars.start())
        self._tasks.start(self._requests.flusher.run())
        self._tasks.start(self._control_loop(control_id))
        self._tasks.start(self._pull())
        self._tasks.start(self._watch_loop())

    async def _watch_loop(self) -> None:
        """End this process and the engine's if the engine is stuck; a supervisor restarts them."""
        limit_s = self._config.stuck_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            if (stuck_s := self._requests.stuck_s()) > limit_s:
                log.error("the engine is stuck, %.0f s at step %d", stuck_s, self._stats.step)
                self._stop(_Outcome.LOST)

    async def _pull(self) -> None:
        try:
            await _with_retry(self._requests.flusher.replay)
            await _with_retry(self._recover)
            await self._drains.pull_between(self._pull_loop)
        finally:
            self._drains.note_pulled()

    async def _pull_loop(self) -> None:
        """Pull requests when there is room for them; until then any free worker can pull them."""
        clock = asyncio.get_running_loop().time
        checked_at = clock()
        while not self._drains.is_on:
            has_room = await self._requests.has_room(self._stats.max_running)
            self._woken.clear()
            try:
                if clock() - checked_at > INBOX_CHECK_S:
                    checked_at = clock()
                    if await self._streams.inbox() - self._requests.held:
                        await self._recover()
                if not has_room or self._drains.is_on:
                    continue
                self._requests.expect()
                pulled = await self._streams.pull(
                    self._config.base_model, self._requests.num_free(self._stats.max_running)
                )
            except (RedisError, OSError) as error:
                log.warning("waiting for Redis: %r", error)
                await asyncio.sleep(RETRY_S)
                await _with_retry(self._recover)  # the lost reply may have had some
                continue
            for item in pulled:
                if job := await self._decode(item.entry_id, item.payload):
                    self._requests.take_up(item.entry_id, job, item.dispatch)
            if not pulled and not self._drains.is_on:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), IDLE_POLL_S)

    async def _recover(self) -> None:
        """Take up unknown requests of the inbox, from an earlier run or a lost reply."""
        async for entries in self._streams.read_pending():
            jobs = [
                (entry_id, job)
                for entry_id, payload in entries
                if (job := await self._decode(entry_id, payload))
                and not self._requests.knows(entry_id, job)
            ]
            if jobs:
                log.info("recovering %d requests", len(jobs))
            self._requests.expect()
            dispatches = await self._streams.begin([(at, job.request_id) for at, job in jobs])
            for (entry_id, job), dispatch in zip(jobs, dispatches, strict=True):
                if dispatch.state in ("done", "gone"):
                    await self._streams.acknowledge(entry_id)
                elif dispatch.state != "replaced":
                    self._requests.take_up(entry_id, job, dispatch)

    async def _decode(self, entry_id: bytes, payload: bytes) -> GenerateJob | None:
        """Return the job of an inbox entry; if it is none, make a dead letter and return None."""
        try:
            return GenerateJob.decode(payload)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.error("an inbox entry is no job: %r", error)
            await _with_retry(
                functools.partial(self._streams.dead_letter, entry_id, payload, repr(error))
            )
            return None

    async def _control_loop(self, last_id: bytes) -> None:
        while True:
            read = functools.partial(self._streams.read_control, last_id)
            for entry_id, message in await _with_retry(read):
                last_id = entry_id
                if message is None:
                    continue
                if message.action == Control.CANCEL and message.request_id:
                    self._requests.cancel(message.request_id)
                elif message.action == Control.DRAIN:
                    self._stop_pulling(is_final=False)
                elif message.action == Control.RESUME:
                    self._drains.resume()
                elif message.action == Control.WAKE:
                    self._woken.set()
                elif message.action == Control.FORGET and message.digest:
                    self._requests.forget_adapter(message.digest)
                elif message.action == Control.PREFETCH:
                    self._requests.prefetches.ask(message)
                elif message.action == Control.PIN_PREFIX:
                    self._requests.prefix_pins.ask(message)

    async def _beat_loop(self) -> None:
        counted_at, counted = time.monotonic(), 0
        while True:
            now, num_tokens = time.monotonic(), self._requests.num_tokens
            self._turned_at = now
            self._tokens_per_s = (num_tokens - counted) / max(now - counted_at, 1e-3)
            counted_at, counted = now, num_tokens
            await self._beat()
            self._requests.cancel_overdue()
            self._requests.prefetches.expire()
            self._requests.prefix_pins.tend()
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _beat(self) -> None:
        async with self._heartbeat_lock:
            if not self._has_left:
                await self._send_heartbeat()

    async def _send_heartbeat(self) -> None:
        try:
            silence_s = await self._streams.beat(self._heartbeat())
        except (RedisError, OSError):
            return
        except Replaced:
            log.error("another run has taken the place of this one, %s", self._boot_id)
            self._stop(_Outcome.CUT)
            return
        self._redis_uptime.note()
        self._heard_at = time.monotonic()
        if self._is_loaded.is_set():
            self._alive.note()
        if self._redis_uptime.is_steady:
            self._requests.cancel_for_dead_gateways(silence_s)
        with contextlib.suppress(RedisError, OSError):  # the next beat looks again
            await self._requests.flusher.resend_buffer.resend_lost()

    def _heartbeat(self) -> Heartbeat:
        stats = self._stats
        return Heartbeat(
            worker_id=self._config.worker_id,
            boot_id=self._boot_id,
            pool=self._config.pool,
            base_model=self._config.base_model,
            base_revision=self._config.base_revision,
            device=self._config.device,
            step=stats.step,
            running=stats.running,
            waiting=max(stats.waiting, len(self._requests) - stats.running),
            max_running=stats.max_running,
            free_pages=stats.free_pages,
            num_pages=stats.num_pages,
            resident_digests=digests_of(stats.resident_digests),
            pinned_digests=digests_of(stats.pinned_digests),
            kept_prefixes=stats.kept_prefixes,
            host_digests=told(digests_of(stats.host_digests)),
            disk_digests=told(self._requests.adapters.on_disk_alone(MAX_TOLD)),
            tokens_per_s=round(self._tokens_per_s, 1),
            draining=self._drains.is_on,
            loading=not self._is_loaded.is_set(),
            started_at=self._started_at,
            precision=tell(stats.precision) or None,
            controls=tuple(control.value for control in Control),
        )

    async def _drain(self) -> None:
        """Finish running requests as far as time allows, and requeue the rest; unless resumed."""
        await self._drains.begun()
        while not await self._has_finished():
            log.info("resumed with %d requests", len(self._requests))
            await self._beat()
            await self._drains.begun()
        if self._end.is_set():
            return  # `_give_requests_back` gives them back
        has_left_all = await self._requests.leave_all()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._requests.flusher.drained()
        except TimeoutError:
            has_left_all = False
        if has_left_all:
            await self._unregister()
        self._stop(_Outcome.DRAINED)

    async def _has_finished(self) -> bool:
        """Wait for the requests, for as long as they may take. -> False if it was resumed."""
        log.info("draining %d requests", len(self._requests))
        await self._beat()  # gateways choose another worker
        deadline = time.monotonic() + self._config.drain_timeout_s
        while self._drains.is_on and time.monotonic() < deadline:
            if self._drains.has_pulled and not len(self._requests):
                break
            await asyncio.sleep(DRAIN_POLL_S)
        if self._drains.is_on:
            self._drains.begin(is_final=True)  # from here on requests are given back
        return self._drains.is_on

    async def _give_requests_back(self) -> None:
        """End the requests with half-sent answers and requeue the rest at once.

        Otherwise they would wait until this worker is found dead."""
        requests = self._requests
        suspects = requests.in_engine if self._outcome is _Outcome.LOST else requests.active
        self._stop_pulling(is_final=True)
        await asyncio.to_thread(self._link.stop)
        if self._is_loaded.is_set():
            await self._drains.pulled()
        has_left_all = await requests.leave_all(LOST, suspects)
        await requests.flusher.drained()
        with contextlib.suppress(RedisError, OSError):
            if has_left_all and not await self._streams.inbox():
                await self._unregister()

    async def _unregister(self) -> None:
        """Unregister this worker, whose inbox must be empty.

        Gateways would give up its requests before another worker takes them over."""
        async with self._heartbeat_lock:  # no heartbeat may follow
            self._has_left = True
            with contextlib.suppress(RedisError, OSError):
                await self._streams.unregister()


async def _with_retry(call: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat a Redis command until Redis answers."""
    while True:
        try:
            return await call()
        except (RedisError, OSError) as error:
            log.warning("waiting for Redis: %r", error)
            await asyncio.sleep(RETRY_S)
