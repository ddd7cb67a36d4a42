"""Engine: connects the engine's parts and runs the step loop. Start reading at `Engine.step`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from engine.adapter_store import make_store
from engine.adapters.files import DigestOf
from engine.config import EngineConfig
from engine.drafts.ahead import MAX_DRAFTS
from engine.drafts.heads import HeadDrafts
from engine.drafts.speculation import Speculation
from engine.errors import RequestError
from engine.execution.batch import BatchBuilder
from engine.execution.in_flight import InFlightStep
from engine.execution.lending import Lending
from engine.execution.runner import ModelRunner
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.pinned_prefixes import PinnedPrefixes
from engine.memory.prefix_cache import PrefixCache
from engine.model.config import ModelConfig
from engine.model.weights import Weights
from engine.request import AdapterPart, FinishReason, KeptPrefix, Request, RequestOutput
from engine.requests import RequestTable
from engine.sampling.grammar import Grammars
from engine.sampling.logits import LogitsProcessor, checked, overflow_of
from engine.sampling.sampler import Sampled, Sampler
from engine.sampling.stopping import end_ids_of, is_full
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence, Step
from engine.stats import AdapterStatus, EngineStats, StepCounts
from engine.validation import RequestValidator

log = logging.getLogger(__name__)

# Longest sleep, in seconds, of a step that finds nothing to run because all requests wait for
# adapters or grammars.
_IDLE_WAIT_S = 0.002


class Engine:
    """Runs many requests at once on one model, each with its own adapters.

    All methods are called from one thread. Loading adapters and compiling grammars happen on
    threads of the engine's own; `close` ends them.

    config  see EngineConfig; raises UnsupportedModel if the model folder is not supported,
            OutOfMemory if the device is too small
    clock   time in seconds, for deadlines, timeouts and retries
    model, weights, tokenizer  if given, they are used instead of the model folder's
    digest_of  if given, an adapter whose files do not have the digest under which it is registered
               is refused: (text of its config, hex sha256 of its tensors) -> digest
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.time,
        *,
        model: ModelConfig | None = None,
        weights: Weights | None = None,
        tokenizer: Any = None,
        digest_of: DigestOf | None = None,
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.model = model = model or ModelConfig.from_folder(config.model_dir)
        self._clock = clock
        self._context_limit = config.context_limit(model)
        self._runner = runner = ModelRunner(config, model, weights)
        self._in_flight: InFlightStep | None = None
        max_kv, max_adapter = config.page_limits(model, num_pages := runner.arena.shape[0])
        self._pool = pool = PagePool(num_pages, max_kv=max_kv, max_adapter=max_adapter)
        self._prefixes = PrefixCache(
            self._pool, is_enabled=config.prefix_cache, has_states=model.plan.delta is not None
        )
        self._store = make_store(config, runner, model, pool, self._prefixes, clock, digest_of)
        most = int(config.pin_share * num_pages)
        self._pins = PinnedPrefixes(self._prefixes, config.page_size, most, self._store.versions)
        self._scheduler = Scheduler(
            pool=self._pool,
            adapters=self._store,
            prefixes=self._prefixes,
            page_size=config.page_size,
            limits=config.scheduler_limits,
            let_pinned_go=partial(self._pins.let_go, self._store.prefetches.let_pinned_go),
            window=config.kv_window(model),
            num_state=config.state_pages(model),
        )
        count, rows = self._scheduler.count_uncomputed, 1 + MAX_DRAFTS * config.speculation
        self._deadlines = Deadlines(config.max_step_tokens, count, rows)
        end_ids = end_ids_of(model, tokenizer, config.model_dir if weights is None else None)
        self._validator = RequestValidator(
            config, model, end_ids, pool, self._store, self._pins, self._scheduler.most_held
        )
        self._builder = self._make_builder(config)
        self._sampler = Sampler(vocab_size=model.vocab_size, device=config.device)
        self._grammars = Grammars(tokenizer or config.model_dir, model.vocab_size)
        self._logits_processor = LogitsProcessor(self._sampler, self._grammars)
        self._requests = RequestTable(
            store=self._store,
            scheduler=self._scheduler,
            sampler=self._sampler,
            grammars=self._grammars,
            deadlines=self._deadlines,
            pins=self._pins,
            stop_ids=self._validator.stop_ids,
            clock=clock,
        )
        self._speculation = self._make_speculation(config)
        self.forget_answers = self._speculation.forget_answers
        self._num_steps = self._num_generated = 0
        self._step_counts = StepCounts()

    def _make_builder(self, config: EngineConfig) -> BatchBuilder:
        return BatchBuilder(
            store=self._store,
            page_size=config.page_size,
            device=config.device,
            adapter_order=self._runner.adapter_order,
            buffers=self._runner.entry_buffers,
            has_row_tables=config.runs_triton,
        )

    def _make_speculation(self, config: EngineConfig) -> Speculation:
        heads, limit = HeadDrafts(self._runner.draft_heads, self._store.tiles), self._context_limit
        return Speculation(config, self._scheduler.tables, self._grammars, limit, heads)

    # Adapters

    def register_adapter(self, digest: str, path: Path) -> None:
        """Register the PEFT folder `path` as `digest`; idempotent. A request has the tensors read.

        Where adapters are kept in FP8, one whose digest ends in ORIGINAL stays in bf16.

        Raises AdapterMismatch, AdapterUnavailable, OutOfPages if it is larger than the arena.
        """
        self._store.register(digest, path)

    def prefetch(self, digest: str, *, to_arena: bool = False) -> None:
        """Have a registered adapter read into host memory, or the arena, before a request needs it.

        A thread reads it in the following steps, once there is room; `has_work` is true until then.
        `adapter_status` says what fails. Raises UnknownAdapter.
        """
        self._store.prefetch(digest, to_arena=to_arena)

    def pin_adapters(self, wanted: SequenceOf[tuple[str, str]]) -> None:
        """Keep these in the arena, as (tenant, digest), as far as limits allow, and no others."""
        self._store.prefetches.pin(wanted)

    def adapter_status(self, digest: str) -> AdapterStatus | None:
        """Return where an adapter is and why it could not be loaded; None if it is not known."""
        return self._store.status(digest)

    def unregister_adapter(self, digest: str) -> None:
        """Forget the adapter and its pins; accepted requests finish with it, new ones cannot."""
        self._store.unregister(digest)
        self._runner.forget_adapter(digest)
        self._pins.forget_adapter(digest)
        self._speculation.forget_adapter(digest)
        self._compute_pins()

    # Requests

    def add(self, request: Request) -> None:
        """Accept a request; its output comes from the steps that follow.

        Raises InvalidPrompt, ContextTooLong, BadGrammar, UnknownAdapter, OutOfPages or
        RequestError; the request is not accepted then. An error that shows later (a schema that
        cannot be enforced, an adapter that cannot be read) is in the request's last RequestOutput.
        """
        if request.request_id in self._requests:
            raise RequestError("the request id is already in use", param="request_id")
        self._validator.check(request)
        self._requests.enter(request)

    def prepare_grammars(self) -> Future[None]:
        """Load the grammar library and its tokenizer on a thread, before a request needs them.

        It takes seconds, and memory that stays in use. The future raises ImportError if Outlines is
        missing.
        """
        return self._grammars.prepare()

    def pin_prefix(
        self,
        token_ids: SequenceOf[int],
        *,
        tenant_id: str = "",
        adapters: tuple[AdapterPart, ...] = (),
    ) -> None:
        """Keep the KV of a prompt's full pages, for the tenant's requests with these adapters.

        Until `unpin_prefix` or `unregister_adapter`; idempotent. Raises PinLimitExceeded, as `add`.
        """
        request = self._pins.request_for(tenant_id, adapters, token_ids)
        self._validator.check(request)
        self._pins.add(request)
        self._compute_pins()

    def unpin_prefix(
        self,
        token_ids: SequenceOf[int],
        *,
        tenant_id: str = "",
        adapters: tuple[AdapterPart, ...] = (),
    ) -> None:
        """Unpin a prefix, so that it can be evicted; do nothing if it is not pinned."""
        self._pins.remove(self._pins.request_for(tenant_id, adapters, token_ids))
        self._compute_pins()

    def keep_prefixes(self, wanted: SequenceOf[KeptPrefix]) -> None:
        """Pin these as leases, as far as limits allow, and no others so; `stats` names them."""
        self._pins.keep(wanted)
        self._compute_pins()

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        index: int | None = None,
    ) -> None:
        """End a request, or one of its n, if it runs; its last outputs come from the next step."""
        self._requests.finish_later(request_id, reason, index=index)

    def has_work(self) -> bool:
        """Return whether `step` has work, now or when an adapter or a grammar is ready."""
        return bool(self._requests) or self._in_flight is not None or self._store.is_prefetching

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one iteration: one new token for every running request, more where drafts are right.

        A CPU's step is committed by the call that launched it, a GPU's by the next: that one first
        launches the step after it, if the device can choose its tokens, by logits and masks alone.
        """
        began_at = time.perf_counter()
        now = self._poll()
        outputs: list[RequestOutput] = []
        while True:
            outputs += self._finish_early(now)
            previous, self._in_flight = self._in_flight, None
            step = self._schedule(previous, now)
            if step.rows:
                self._speculation.propose(step, is_ahead=previous is not None)
                batch = None if step.new_pages is not None else self._builder.build(step)
                self._in_flight = self._runner.launch(step, batch, self._logits_processor)
            outputs += self._commit(previous, now)
            outputs += self._requests.finish_failed(step)
            if previous is None or self._in_flight is not None:
                break
            # Nothing was launched over the placeholders, or one was wrong: repeat the step without
            # any.
        if (launched := self._in_flight) is not None:
            self._speculation.cut(launched.step)
            launched.choose()
            if launched.is_done:  # on a CPU
                self._in_flight = None
                outputs += self._commit(launched, now)
        self._speculation.learn()
        if step.rows:
            self._step_counts.add(len(step.rows), time.perf_counter() - began_at)
        elif not outputs:
            self._wait()
        return self._pins.without_own(outputs)

    @property
    def computes_first_token(self) -> bool:
        """Return whether a request's first token is in the step in flight: `settle` reads it."""
        launched = self._in_flight
        return launched is not None and any(
            sequence.num_generated == 0 for sequence in launched.step.sampling
        )

    @torch.inference_mode()
    def settle(self) -> list[RequestOutput]:
        """Wait for the step in flight and return its outputs; launch none.

        For callers that have other work for the device, and would have to wait for a further step.
        """
        launched, self._in_flight = self._in_flight, None
        return self._pins.without_own(self._commit(launched, self._clock()))

    def stats(self) -> EngineStats:
        cached, pinned = self._prefixes.num_idle, self._pins.num_pages
        return EngineStats(
            step=self._num_steps,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            max_running=self._scheduler.max_running,
            num_pages=self._pool.num_pages,
            free_pages=self._pool.num_free + cached,
            cached_pages=cached,
            kv_pages=self._pool.num_used(PageUse.KV) - cached - pinned,
            pinned_pages=pinned,
            adapter_pages=self._pool.num_used(PageUse.ADAPTER),
            lent_pages=len(self.lending.pages),
            trained_seconds=self.lending.trained_s,
            resident_digests=self._store.resident_digests,
            host_digests=self._store.host_digests,
            pinned_digests=self._store.prefetches.pinned_digests,
            kept_prefixes=self._pins.kept_names,
            num_adapters=self._store.num_registered,
            num_generated=self._num_generated,
            preemptions=dict(self._scheduler.preemptions),
            step_rows=self._step_counts.rows.copy(),
            step_seconds=self._step_counts.seconds.copy(),
            adapter_loads=self._store.load_counts,
            drafts=self._speculation.read_counts(),
            precision=self._runner.precision,
            uses_draft_heads=self._runner.draft_heads is not None,
        )

    @cached_property
    def lending(self) -> Lending:
        """Return the memory and weights that a trainer in the engine's thread may use."""
        return Lending(self._pool, self._prefixes, self._scheduler, self._store, self._runner)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every owner's state agrees with itself and the others'."""
        self._scheduler.check_integrity()
        self._store.check_integrity()
        self._prefixes.check_integrity()
        self._pins.check_integrity()
        running = self._scheduler.running
        tables = [*(s.pages for s in running), *(s.state_pages for s in running)]
        cached = [self._prefixes.owned_pages(), *self._pins.owned_pages(), self.lending.pages]
        self._pool.check_integrity([*tables, *self._store.owned_pages(), *cached])
        known = self._requests.all_sequences()
        assert known == {*self._scheduler.waiting, *self._scheduler.running}
        self._grammars.check_integrity(known)

    def close(self) -> None:
        """End the engine's threads."""
        self._store.close()
        self._grammars.close()

    # The stages of a step

    def _poll(self) -> float:
        """Take in what threads have finished and which deadlines have passed; return the time."""
        self._compute_pins()
        self._store.poll(self._scheduler.wanted_adapters())
        for sequence, failure in self._grammars.poll():
            self._fail(sequence, failure)
        self._requests.fail_unloadable()
        now = self._clock()
        self._deadlines.pace.stop(now)
        for request_id, late in self._deadlines.too_late(now):
            self._requests.finish_later(request_id, FinishReason.ERROR, late)
        return now

    def _compute_pins(self) -> None:
        """Start requests that compute pinned prefixes; cancel those whose pin is gone."""
        for request_id in self._pins.orphans():
            self.cancel(request_id)
        for request in self._pins.due(self._clock(), self._validator.check):
            self._requests.enter(request)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self._requests.finish_later(sequence.request.request_id, FinishReason.ERROR, error)

    def _finish_early(self, now: float) -> list[RequestOutput]:
        """End sequences that were cancelled, failed or are late, after the step in flight.

        If there are none, a step whose tokens the device chooses stays in flight, as placeholders.
        """
        launched = self._in_flight
        must_end = self._requests.has_pending or launched is None or not launched.can_go_on
        if launched is not None and not must_end and not self._speculation.waits(launched.step):
            launched.append_placeholders(self._scheduler.commit)
            return []
        self._in_flight = None
        return self._commit(launched, now) + self._requests.finish_pending()

    def _schedule(self, previous: InFlightStep | None, now: float) -> Step:
        """Plan the next step; the tokens of `previous`, if given, are placeholders."""
        if previous is None:
            return self._scheduler.schedule(now)
        for sequence in previous.step.sampling:
            if is_full(sequence, self._context_limit):
                self._requests.release(sequence)  # its last token is in flight
        may_draft = self._speculation.look_ahead(previous)
        if previous.can_replay and not may_draft and not self._scheduler.can_admit(now):
            new_pages = self._scheduler.reserve_next_pages(previous.step.rows)
            if new_pages is not None:
                previous.step.new_pages = new_pages
                return previous.step
        return self._scheduler.schedule(now)

    def _commit(self, launched: InFlightStep | None, now: float) -> list[RequestOutput]:
        """Wait for a step's tokens and append them to their sequences.

        If a placeholder stood for another token than the step's, drops the step that was launched
        over it: it is scheduled and computed again.
        """
        if launched is None:
            return []
        self._deadlines.pace.start(now, launched.step.num_tokens)
        sampling = launched.step.sampling
        sampled = list(map(checked, sampling, launched.read()))
        launched.remove_placeholders()
        self._num_steps += 1
        launched.commit(self._scheduler.commit)
        overflowed = launched.scores.tell() if launched.scores is not None else []
        for sequence in overflowed:
            self._fail(sequence, overflow_of(sequence))
        self._grammars.consume(
            (sequence, token.token_id)
            for sequence, token in zip(sampling, sampled, strict=True)
            if not (sequence.has_ended or sequence in launched.void or token.error)
        )
        outputs: dict[Sequence, RequestOutput] = {}
        self._take(outputs, sampling, sampled, overflowed, launched.void)
        for sequences, tokens in launched.further(self._scheduler.commit):
            self._take(outputs, sequences, list(map(checked, sequences, tokens)))
        for sequence, output in outputs.items():
            sequence.count(output)
        dropped = None
        if launched.is_mispredicted:  # known only after all are read: certain drafts come first
            dropped, self._in_flight = self._in_flight, None
            if dropped is not None:
                self._scheduler.restart(dropped.step.rows)
        self._speculation.settle(launched, dropped, self._in_flight)
        return list(outputs.values())

    def _take(
        self,
        outputs: dict[Sequence, RequestOutput],
        sequences: list[Sequence],
        tokens: list[Sampled],
        overflowed: SequenceOf[Sequence] = (),
        void: Collection[Sequence] = (),
    ) -> None:
        """Append one token to each sequence that is not `void`, and to its output of this step."""
        for sequence, token in zip(sequences, tokens, strict=True):
            # It has ended in the step before, when this one was in flight.
            if sequence.has_ended or sequence in void:
                continue
            output = outputs.get(sequence)
            if output is None:
                output = outputs[sequence] = sequence.output()
            error = token.error
            if overflowed and sequence in overflowed:
                error = overflow_of(sequence)
            if error is not None:
                self._requests.finish(sequence, FinishReason.ERROR, error, output)
            else:
                sequence.token_ids.append(token.token_id)
                self._num_generated += 1
                self._requests.accept(sequence, token, self._context_limit, output)

    def _wait(self) -> None:
        """Sleep briefly, as nothing can run until a thread has finished."""
        if self._store.is_loading:
            self._store.wait(_IDLE_WAIT_S)
        elif self._requests:
            time.sleep(_IDLE_WAIT_S)
