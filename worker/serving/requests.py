"""Requests: the requests of one worker, each from its lease to its DoneRecord.

`take_up` (a lease is held) -> `_prepare` (adapter on the disk, prompt in tokens) -> the engine ->
`on_outputs` (tokens to text) -> `Flusher` (events to the gateway, the last with the DoneRecord).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Set

import structlog
from redis.exceptions import RedisError

from contract.messages.protocol import (
    HEARTBEAT_TIMEOUT_S,
    MAX_ATTEMPTS,
    DoneRecord,
    ErrorCode,
    FinishReason,
    GenerateJob,
    Task,
)
from contract.queue.reply_streams import is_batch_stream
from engine.request import RequestOutput
from engine.text.codec import TextCodec
from worker.config import WorkerConfig
from worker.engine_process.channel import Cancel, Command
from worker.errors import Refused
from worker.grammar.checks import checks_of
from worker.grammar.service import GrammarService
from worker.serving.active_request import ActiveRequest
from worker.serving.adapter_cache import AdapterFetchError, Fetch
from worker.serving.adapters import Adapters
from worker.serving.choice import Choice
from worker.serving.engine_commands import EngineId, engine_ids, read_prompts, to_requests
from worker.serving.flusher import Flusher
from worker.serving.prefetches import Prefetches
from worker.serving.prefix_pins import PrefixPins
from worker.serving.spool import Spool
from worker.serving.streams import Dispatch, Streams
from worker.serving.tasks import Tasks
from worker.serving.tokenizing import answer_of

log = logging.getLogger(__name__)

#: Largest number of requests held at a time, whatever the engine's limit.
MAX_ACTIVE = 1024
#: Requests held beyond those that the engine runs, so that one is ready when another ends. Few,
#: because the worker cannot reorder them any more.
LOOKAHEAD = 4
#: Seconds between two reads of the inbox while there is no room.
ROOM_WAIT_S = 2.0
LOST = "The worker that ran this request was lost before it finished."
GIVEN_UP = "This request ended the workers that ran it."
STOPPED = "The worker was stopped before this request finished."
FAILED = "The worker failed on this request."
TOO_LATE = "The request waited longer than its deadline."


class Requests:
    """Owns the requests for which this worker holds a lease.

    send   sends a command to the engine
    tasks  the worker's tasks
    on_end see Flusher
    """

    def __init__(
        self,
        config: WorkerConfig,
        streams: Streams,
        *,
        send: Callable[[Command], None],
        fetch: Fetch,
        tasks: Tasks,
        on_end: Callable[[DoneRecord], None] = lambda record: None,
    ) -> None:
        self._config = config
        self._streams = streams
        self._send = send
        self._tasks = tasks
        self._codec = TextCodec(config.model_dir)
        self.adapters = Adapters(config, send=send, fetch=fetch)
        self.prefetches = Prefetches(
            self.adapters,
            send=send,
            tasks=tasks,
            host_bytes=config.host_bytes,
            disk_bytes=config.adapter_cache_bytes,
        )
        self.prefix_pins = PrefixPins(
            self.adapters,
            codec=self._codec,
            send=send,
            tasks=tasks,
            disk_bytes=config.adapter_cache_bytes,
        )
        self.flusher = Flusher(
            streams,
            interval_s=config.flush_interval_s,
            on_refused=self._on_refused,
            spool=Spool(config.adapter_dir.parent / f"spool-{config.worker_id}.jsonl"),
            on_end=on_end,
        )
        self.grammars = GrammarService(config.model_dir)
        self._progress_at = time.monotonic()
        self.num_tokens = 0  # generated since the start
        self._active: dict[str, ActiveRequest] = {}
        self._checking: set[bytes] = set()  # inbox entries whose answers are being checked
        self._room = asyncio.Event()  # set when a request has ended and there is room for another
        self._cancelled_early: set[str] = set()  # unknown ids that were cancelled since `expect`
        self._alone = asyncio.Lock()  # held by a request that may have crashed an earlier worker

    def __len__(self) -> int:
        return len(self._active)

    def knows(self, entry_id: bytes, job: GenerateJob) -> bool:
        """Return whether this attempt runs here, or its end has not reached Redis yet."""
        request = self._active.get(job.request_id)
        is_active = request is not None and request.entry_id == entry_id
        return is_active or entry_id in self.flusher.unsent

    @property
    def held(self) -> set[bytes]:
        """Return the attempts whose end has not been published yet, as far as is known here."""
        return self.flusher.unsent | self.active

    @property
    def active(self) -> set[bytes]:
        """Return the attempts that have not ended here."""
        return {request.entry_id for request in self._active.values()}

    def num_free(self, max_running: int) -> int:
        """Return how many more requests may be taken up."""
        held = sum(request.job.num_choices for request in self._active.values())
        return min(MAX_ACTIVE, (max_running or MAX_ACTIVE) + LOOKAHEAD) - held

    async def has_room(self, max_running: int) -> bool:
        """Wait a while for room; return whether another request may be taken up."""
        if self.num_free(max_running) <= 0:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_WAIT_S):
                    await self._room.wait()
        return self.num_free(max_running) > 0

    def expect(self) -> None:
        """Note that requests are about to be pulled: a cancellation from now on may be for one."""
        self._cancelled_early.clear()

    def take_up(self, entry_id: bytes, job: GenerateJob, dispatch: Dispatch) -> None:
        """Start or end a request whose lease was just taken."""
        if self.knows(entry_id, job):
            return  # the inbox was read twice
        if earlier := self._active.get(job.request_id):
            self._drop(earlier)  # this worker was thought dead, and now gets the request again
        now = time.time()
        request = ActiveRequest(
            job,
            entry_id=entry_id,
            lease=dispatch.lease,
            worker_id=self._config.worker_id,
            codec=self._codec,
            now=now,
            attempt=dispatch.attempt,
        )
        self._active[job.request_id] = request
        if dispatch.emitted:
            # The client has got part of an answer, which cannot be continued.
            request.remember(dispatch.usage)
        if dispatch.is_cancelled or job.request_id in self._cancelled_early:
            request.cancel(now)
        elif dispatch.emitted:
            request.fail(ErrorCode.WORKER_LOST, LOST, now=now)
        elif dispatch.attempt > MAX_ATTEMPTS:
            request.fail(ErrorCode.GIVEN_UP, GIVEN_UP, now=now)
        elif job.deadline is not None and job.deadline < now:
            request.fail(ErrorCode.DEADLINE_EXCEEDED, TOO_LATE, now=now)
        if request.is_finished:
            self._finish(request)
            return
        self._tasks.start(self._prepare(request, dispatch.attempt))

    async def _prepare(self, request: ActiveRequest, attempt: int) -> None:
        """Send the request to the engine, or end it with the error."""
        job = request.job
        structlog.contextvars.bind_contextvars(**request.log_context)  # only for this task
        try:
            if job.base_model != self._config.base_model:
                raise Refused(
                    ErrorCode.INTERNAL, f"This worker serves {self._config.base_model}.", "model"
                )
            if job.task in (Task.TOKENIZE, Task.DETOKENIZE):
                told = await asyncio.to_thread(answer_of, job, self._codec)
                request.answer(told, time.time())
                self._finish(request)
                return
            await self._load_adapters(request)
            if attempt > 1:
                await self._wait_to_run_alone(request)
            prompts = await asyncio.to_thread(read_prompts, job, self._codec)
            adapters = self.adapters.parts_of(job.adapters)
            requests = to_requests(job, request.lease, prompts, self._codec, adapters)
            await self.grammars.admit(requests[0])
        except Refused as refused:
            request.fail(refused.code, refused.message, refused.param, now=time.time())
        except Exception:
            log.exception("request %s could not be prepared", job.request_id)
            request.fail(ErrorCode.INTERNAL, FAILED, now=time.time())
        if request.is_finished:  # it needs no engine, or was cancelled while it was prepared
            self._finish(request)
            self._release(request)  # what was acquired after the cancellation
            return
        request.show_prompts(prompts)
        if job.with_token_ids:
            request.show_prompt_ids([prompt.token_ids for prompt in prompts])
        request.timings.started = time.time()
        request.in_engine = True
        for engine_request in requests:
            self._send(engine_request)

    async def _wait_to_run_alone(self, request: ActiveRequest) -> None:
        """Run requests that were in a crash one at a time: the next crash shows the cause."""
        await self._alone.acquire()

        async def release_at_end() -> None:
            await request.released.wait()
            self._alone.release()

        self._tasks.start(release_at_end())
        with contextlib.suppress(RedisError, OSError):
            await self._streams.will_run_alone(request.job.request_id, request.lease)

    async def _load_adapters(self, request: ActiveRequest) -> None:
        for ref in request.job.adapters:
            try:
                tier = await self.adapters.load_for_request(ref)
            except AdapterFetchError as error:
                log.warning("adapter %s cannot be had: %s", ref.digest, error)
                raise Refused(
                    ErrorCode.ADAPTER_UNAVAILABLE, "The adapter cannot be fetched now.", "model"
                ) from error
            request.held_digests += (ref.digest,)
            request.note_tier(tier)
        request.timings.loaded = time.time()

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        """Take in the outputs of a step of the engine."""
        now = time.time()
        if outputs:
            self.note_progress()
        for output in outputs:
            self.num_tokens += len(output.token_ids)
            engine_id = EngineId.parse(output.request_id)
            request = self._active.get(engine_id.request_id)
            if request is None or request.lease != engine_id.lease:
                continue  # it has ended here: at a stop string, or its lease was taken over
            stopped = self._feed(request, output, now, engine_id.prompt)
            if request.is_finished:
                if request.runs_on:
                    self._cancel_in_engine(request, FinishReason.STOP)
                self._finish(request)
                continue
            if request.awaits_check and request.entry_id not in self._checking:
                self._checking.add(request.entry_id)
                self._tasks.start(self._check_answers(request))
            if stopped is not None:
                self._send(Cancel(output.request_id, FinishReason.STOP, stopped))
            self.flusher.add(request)

    def _feed(
        self, request: ActiveRequest, output: RequestOutput, now: float, prompt: int
    ) -> int | None:
        """Call `ActiveRequest.feed`; an exception in it ends this request alone."""
        try:
            return request.feed(output, now, prompt=prompt)
        except Exception:
            log.exception("the output of %s cannot be taken in", request.job.request_id)
            request.fail(ErrorCode.INTERNAL, FAILED, now=now)
            return None

    async def _check_answers(self, request: ActiveRequest) -> None:
        """Check the finished answers against their schema, and then end the request."""
        structlog.contextvars.bind_contextvars(**request.log_context)  # only for this task
        try:
            for choice in request.unchecked:
                await self._check(choice, request.job)
            request.conclude(time.time())
        except Exception:
            log.exception("the answer of %s could not be checked", request.job.request_id)
            request.fail(ErrorCode.INTERNAL, FAILED, now=time.time())
        self._checking.discard(request.entry_id)
        self._finish(request)

    async def _check(self, choice: Choice, job: GenerateJob) -> None:
        """Note the choice's first problem, preferably one that ends the request."""
        checks = sorted(checks_of(job, choice.answer), key=lambda check: not check.is_strict)
        for check in checks:
            problem = await self.grammars.problem_of(check.schema, check.text, job.tenant_id)
            if problem is not None:
                choice.note_check(check.told(problem), check.param if check.is_strict else None)
                return
        choice.note_check(None)

    def _cancel_in_engine(self, request: ActiveRequest, reason: FinishReason) -> None:
        for engine_id in engine_ids(request.job, request.lease):
            self._send(Cancel(engine_id, reason))

    def note_progress(self) -> None:
        """Note that the engine has made progress."""
        self._progress_at = time.monotonic()

    def stuck_s(self) -> float:
        """Return for how many seconds the engine has had requests and made no progress."""
        if not any(request.runs_on for request in self._active.values()):
            self.note_progress()
        return time.monotonic() - self._progress_at

    def _finish(self, request: ActiveRequest) -> None:
        """Send the last event and the DoneRecord, and release the request's adapters."""
        if self._active.get(request.job.request_id) is not request:
            return
        del self._active[request.job.request_id]
        self.flusher.add(request)
        self._release(request)
        log.info("request ended", extra=request.log_fields)

    def _release(self, request: ActiveRequest) -> None:
        for digest in request.held_digests:
            self.adapters.release(digest)
        request.held_digests = ()
        request.released.set()
        self._room.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a request; the engine's last output still counts its tokens."""
        request = self._active.get(request_id)
        if request is None:
            self._cancelled_early.add(request_id)
        elif request.in_engine:
            self._cancel_in_engine(request, FinishReason.CANCELLED)
        else:
            request.cancel(time.time())
            self._finish(request)

    def cancel_for_dead_gateways(self, silence_s: Mapping[str, float]) -> None:
        """Cancel requests of dead gateways; silence_s: gateway id -> seconds since heartbeat."""
        for request_id, request in list(self._active.items()):
            gateway_id = request.job.gateway_id  # empty: no gateway waits for it
            if not gateway_id or is_batch_stream(gateway_id):
                continue
            if silence_s.get(gateway_id, HEARTBEAT_TIMEOUT_S) >= HEARTBEAT_TIMEOUT_S:
                self.cancel(request_id)

    def cancel_overdue(self) -> None:
        """End requests past their deadline that are not in the engine."""
        now = time.time()
        for request in list(self._active.values()):
            if not request.in_engine and request.job.deadline and request.job.deadline < now:
                request.fail(ErrorCode.DEADLINE_EXCEEDED, TOO_LATE, now=now)
                self._finish(request)

    @property
    def in_engine(self) -> set[bytes]:
        """Return the attempts that the engine works on; one of them may have crashed it."""
        return {request.entry_id for request in self._active.values() if request.runs_on}

    async def leave_all(self, message: str = STOPPED, suspects: Set[bytes] = frozenset()) -> bool:
        """End requests that have sent events, with the message, and requeue the rest.

        suspects  the attempts that may have crashed the engine or this process

        Returns whether Redis has stored all of it.
        """
        has_left_all = True
        for request in list(self._active.values()):
            if request.is_begun:
                request.fail(ErrorCode.WORKER_LOST, message, now=time.time())
                self._finish(request)
            elif has_left_all:
                has_left_all = await self._give_away(request, request.entry_id in suspects)
            else:  # Redis does not answer; the request stays in the inbox
                self._forget(request)
        return has_left_all

    async def _give_away(self, request: ActiveRequest, is_suspect: bool) -> bool:
        """Requeue it, or end it if it has crashed too many workers; return whether Redis knows."""
        request_id, lease = request.job.request_id, request.lease
        try:
            if is_suspect and request.attempt >= MAX_ATTEMPTS:
                await self._streams.mark_poison(request_id, lease)
                request.fail(ErrorCode.GIVEN_UP, GIVEN_UP, now=time.time())
                self._finish(request)
            else:
                self._forget(request)
                await self._streams.requeue(
                    request_id, lease, request.entry_id, is_suspect=is_suspect
                )
        except (RedisError, OSError) as error:
            log.warning("%s and what follows are left in the inbox: %r", request_id, error)
            self._forget(request)
            return False
        return True

    def _on_refused(self, entry_ids: list[bytes]) -> None:
        of_entry = {request.entry_id: request for request in self._active.values()}
        for entry_id in entry_ids:
            self.flusher.forget(entry_id)
            if request := of_entry.get(entry_id):
                self._drop(request)

    def _drop(self, request: ActiveRequest) -> None:
        """Drop an attempt whose lease was taken over."""
        log.warning("%s: lease %d was taken over", request.job.request_id, request.lease)
        self._forget(request)

    def _forget(self, request: ActiveRequest) -> None:
        """Stop an attempt, and send nothing more for it."""
        if self._active.get(request.job.request_id) is request:
            del self._active[request.job.request_id]
        self.flusher.forget(request.entry_id)
        request.cancel(time.time())
        if request.in_engine:
            self._cancel_in_engine(request, FinishReason.CANCELLED)
        self._release(request)

    def forget_adapter(self, digest: str) -> None:
        """Drop a deleted adapter from the disk and the engine once no request uses it."""
        self.prefetches.drop(digest)
        self.prefix_pins.drop(digest)
        self.adapters.drop(digest)
