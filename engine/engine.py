"""Engine: the only file that knows all the others. Start at `Engine.step`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch

from engine.adapter_files import AdapterReader, DigestOf
from engine.adapters import AdapterStore, LoadLimits
from engine.batch import BatchBuilder
from engine.config import EngineConfig, ModelConfig
from engine.deadlines import Deadlines
from engine.endings import Endings
from engine.errors import BadGrammar, EngineError, RequestError
from engine.flight import Flight
from engine.grammar import Grammars
from engine.host_memory import HostMemory
from engine.intake import Intake
from engine.memory import PagePool, PageUse
from engine.pins import PinnedPrefixes
from engine.prefix_cache import PrefixCache
from engine.request import AdapterPart, FinishReason, Request, RequestOutput
from engine.runner import ModelRunner
from engine.sampler import Sampled, Sampler
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Step
from engine.stats import EngineStats
from engine.weights import Weights

log = logging.getLogger(__name__)

# A step that finds nothing to run, because all wait for adapters or grammars, sleeps this long
# at most.
_IDLE_WAIT_S = 0.002


class Engine:
    """Runs many requests at once on one model, each with its own adapters.

    All methods are called from one thread. Loading adapters and compiling grammars happen on
    threads of the engine's own; `close` ends them.

    config  see EngineConfig; raises UnsupportedModel when the model folder does not fit,
            OutOfMemory when the device is too small
    clock   what deadlines, timeouts and retries are measured on, in seconds
    model, weights, tokenizer  given, the model folder's own are not read
    digest_of  given, an adapter whose files have another digest than it is registered by is
               refused when it is read: (text of its config, hex sha256 of its tensors) -> digest
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
        self._page_size = config.page_size
        self._runner = ModelRunner(config, model, weights)
        self._flight: Flight | None = None
        num_pages = self._runner.arena.shape[0]
        max_kv, max_adapter = config.page_limits(model, num_pages)
        self._pool = PagePool(num_pages, max_kv=max_kv, max_adapter=max_adapter)
        self._prefixes = PrefixCache(self._pool, is_enabled=config.prefix_cache)
        self._store = AdapterStore(
            reader=AdapterReader(model, config.page_layout(model), self._runner.base, digest_of),
            pool=self._pool,
            prefixes=self._prefixes,
            arena=self._runner.arena,
            host=HostMemory(self._runner.arena, config.host_cache_bytes),
            costs=config.reload_costs(model),
            limits=LoadLimits(
                num_threads=config.loader_threads,
                max_prefetch=config.max_prefetch,
                timeout_s=config.load_timeout_s,
            ),
            clock=clock,
        )
        self._scheduler = Scheduler(
            pool=self._pool,
            adapters=self._store,
            prefixes=self._prefixes,
            page_size=config.page_size,
            limits=config.scheduler_limits,
        )
        self._deadlines = Deadlines(config.max_step_tokens, self._scheduler.count_uncomputed)
        self._pins = PinnedPrefixes(
            self._prefixes, config.page_size, int(config.pin_share * num_pages)
        )
        self._intake = Intake(config, model, pool=self._pool, store=self._store, pins=self._pins)
        self._builder = BatchBuilder(
            store=self._store,
            page_size=config.page_size,
            device=config.device,
            adapter_order=self._runner.adapter_order,
        )
        self._sampler = Sampler(vocab_size=model.vocab_size, device=config.device)
        self._grammars = Grammars(tokenizer or config.model_dir, model.vocab_size)
        self._requests: dict[str, list[Sequence]] = {}  # those that have not ended
        self._endings = Endings()
        self._num_arrivals = self._num_steps = self._num_generated = 0

    # Adapters

    def register_adapter(self, digest: str, path: Path) -> None:
        """Make the PEFT folder `path` known as `digest`; idempotent.

        Reads the config and the tensor header; the tensors are read when a request first needs
        them. Raises AdapterMismatch when they do not fit the base model, AdapterUnavailable when
        they cannot be read, OutOfPages when the arena could never hold the adapter.
        """
        self._store.register(digest, path)

    def unregister_adapter(self, digest: str) -> None:
        """Forget the adapter and its pins; accepted requests finish with it, new ones cannot."""
        self._store.unregister(digest)
        self._runner.forget_adapter(digest)
        self._pins.forget_adapter(digest)
        self._compute_pins()

    # Requests

    def add(self, request: Request) -> None:
        """Accept a request; its output comes from the steps that follow.

        Raises, accepting nothing, InvalidPrompt, ContextTooLong, BadGrammar, UnknownAdapter,
        OutOfPages or RequestError. What shows only later (a schema that cannot be enforced, an
        adapter that cannot be read) ends the request with its error in a RequestOutput.
        """
        if request.request_id in self._requests:
            raise RequestError("the request id is already in use", param="request_id")
        self._intake.check(request)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        sequences = Sequence.of(request, self._num_arrivals, self._intake.stop_ids(request))
        self._num_arrivals += len(sequences)
        self._requests[request.request_id] = live = list(sequences)
        self._deadlines.add(live)
        now = self._clock()
        for sequence in sequences:
            self._store.add_user(sequence.digests)
            self._sampler.add(sequence)
            self._scheduler.add(sequence, now)
            self._grammars.add(sequence)

    def pin_prefix(
        self,
        token_ids: SequenceOf[int],
        *,
        tenant_id: str = "",
        adapters: tuple[AdapterPart, ...] = (),
    ) -> None:
        """Keep the KV of a prompt's full pages, for the tenant's requests with these adapters.

        They are computed once there is room, and stay until `unpin_prefix` or until one of the
        adapters is unregistered. Idempotent. Raises PinLimitExceeded, and what `add` raises.
        """
        request = self._pins.request_for(tenant_id, adapters, token_ids)
        self._intake.check(request)
        self._pins.add(request)
        self._compute_pins()

    def unpin_prefix(
        self,
        token_ids: SequenceOf[int],
        *,
        tenant_id: str = "",
        adapters: tuple[AdapterPart, ...] = (),
    ) -> None:
        """Let a pinned prefix go like any other; does nothing when it is not pinned."""
        self._pins.remove(self._pins.request_for(tenant_id, adapters, token_ids))
        self._compute_pins()

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        index: int | None = None,
    ) -> None:
        """End a request, or one of its n; the last outputs, with `reason`, come from the next step.

        Idempotent; does nothing for what has ended or never was.
        """
        self._endings.add(self._requests.get(request_id, ()), reason, index=index)

    def has_work(self) -> bool:
        """Whether `step` has anything to do, now or as soon as an adapter or grammar is ready."""
        return bool(self._requests) or self._flight is not None

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one iteration: at most one new token for every running request.

        On a GPU a step's tokens come from the next call, which launches another step first where
        it can: before the tokens are read, or as soon as they are.
        """
        return self._pins.without_own(self._iterate())

    def _iterate(self) -> list[RequestOutput]:
        self._poll()
        now = self._clock()
        self._deadlines.pace.stop(now)
        for request_id, late in self._deadlines.too_late(now):
            self._endings.add(self._requests.get(request_id, ()), FinishReason.ERROR, late)
        outputs: list[RequestOutput] = []
        if self._flight is not None:
            self._deadlines.pace.start(now, self._flight.step.num_tokens)
            flight, self._flight = self._flight, self._follow(self._flight)
            outputs = self._land(flight)
            if self._flight is not None:
                return outputs
        outputs += self._end_early()
        step = self._scheduler.schedule(now)
        for sequence, error in step.failed:
            outputs.append(self._end(sequence, FinishReason.ERROR, error))
        if not step.rows:
            if not outputs:
                self._wait()
            return outputs
        if self._runner.gpu is None:
            self._deadlines.pace.start(now, step.num_tokens)
            return outputs + self._land(self._launch(step))
        self._flight = self._launch(step)
        return outputs

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
            resident_digests=self._store.resident_digests,
            num_adapters=self._store.num_registered,
            num_generated=self._num_generated,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every owner's state agrees with itself and the others'."""
        self._scheduler.check_integrity()
        self._store.check_integrity()
        self._prefixes.check_integrity()
        self._pins.check_integrity()
        tables = [sequence.page_table for sequence in self._scheduler.running]
        cached = self._prefixes.owned_pages()
        pinned = self._pins.owned_pages()
        self._pool.check_integrity([*tables, *self._store.owned_pages(), cached, *pinned])
        known = {s for sequences in self._requests.values() for s in sequences}
        if self._flight is None:
            assert known == {*self._scheduler.waiting, *self._scheduler.running}
        self._grammars.check_integrity(known)

    def close(self) -> None:
        """End the engine's threads."""
        self._store.close()
        self._grammars.close()

    # The stages of a step

    def _poll(self) -> None:
        """See what the loader and grammar threads have finished, and what pins lack."""
        self._compute_pins()
        self._store.poll(self._scheduler.wanted_adapters())
        for sequence, failure in self._grammars.poll():
            self._fail(sequence.request.request_id, failure)
        if not self._store.has_failures:
            return
        for sequence in self._scheduler.waiting:
            for digest in sequence.digests:
                error = self._store.error(digest)
                if error is not None:
                    self._fail(sequence.request.request_id, error)

    def _compute_pins(self) -> None:
        """Begin what pins lack, and end what has lost its pin."""
        for request_id in self._pins.orphans():
            self.cancel(request_id)
        for request in self._pins.due(self._clock(), self._intake.check):
            self._enter(request)

    def _fail(self, request_id: str, error: BaseException) -> None:
        if not isinstance(error, EngineError):
            log.error("request failed", exc_info=error, extra={"request_id": request_id})
            error = EngineError(f"internal error: {type(error).__name__}")
        self._endings.add(self._requests.get(request_id, ()), FinishReason.ERROR, error)

    def _end_early(self) -> list[RequestOutput]:
        """End what was cancelled, has failed or is past its deadline."""
        return [self._end(*ending) for ending in self._endings.take()]

    def _launch(self, step: Step) -> Flight:
        """Run the step, on a GPU without waiting for it.

        Where nothing but the logits decides, tokens are chosen on the device; else, when the step
        lands: by then the caller has dealt with the outputs of the step before.
        """
        batch = self._builder.build(step)
        sequences = [row.sequence for row in step.rows if row.samples]
        gpu = self._runner.gpu
        if gpu is not None and gpu.takes(batch) and all(map(self._is_free, sequences)):
            draw = self._sampler.draw(sequences)
            tokens = gpu.start(batch, draw)
            runner = gpu if gpu.can_go_on(batch) else None
            return Flight(step=step, finish=tokens.sampled, tokens=tokens, runner=runner, draw=draw)
        logits = self._runner.run(batch)
        return Flight(step=step, finish=functools.partial(self._sample, logits, sequences))

    def _is_free(self, sequence: Sequence) -> bool:
        return self._grammars.matcher(sequence) is None and self._sampler.is_free(sequence)

    def _follow(self, flight: Flight) -> Flight | None:
        """Launch the next step of the same rows, unless something speaks against it."""
        rows = flight.step.rows
        if (
            flight.runner is None
            or self._endings
            or self._scheduler.can_admit(self._clock())
            or any(self._must_end(row.sequence) for row in rows)
        ):
            return None
        new_pages = self._scheduler.look_ahead(rows)
        return None if new_pages is None else flight.go_on(new_pages)

    def _land(self, flight: Flight) -> list[RequestOutput]:
        """Wait for a step's tokens and hand them to their sequences."""
        sampled = iter(flight.finish())
        if self._flight is not None and flight.went_wrong:
            self._flight.finish()  # its pages may be given away when nothing writes to them
            self._flight = None
        self._num_steps += 1
        outputs = []
        for row in flight.step.rows:
            sequence = row.sequence
            token = next(sampled) if row.samples else None
            if sequence.has_ended:
                self._release(sequence)  # it ended in the step before, when this was under way
                continue
            self._scheduler.commit(row)
            if token is not None:
                self._num_generated += 1
                outputs.append(self._accept(sequence, token))
        return outputs

    def _must_end(self, sequence: Sequence) -> bool:
        """Whether the token under way is the request's last, whatever it is, or it has ended."""
        limit = sequence.request.sampling.max_tokens
        return (
            sequence.has_ended
            or (limit is not None and sequence.num_generated + 1 >= limit)
            or sequence.num_tokens + 1 >= self._context_limit
        )

    def _release(self, sequence: Sequence) -> None:
        """Give back what a sequence that has ended held."""
        self._scheduler.remove(sequence)
        self._store.remove_user(sequence.digests)

    def _wait(self) -> None:
        """Nothing can run: sleep until a thread has news, briefly."""
        if self._store.is_loading:
            self._store.wait(_IDLE_WAIT_S)
        elif self._requests:
            time.sleep(_IDLE_WAIT_S)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        logits = logits.float()
        wants_logprobs = any(s.request.sampling.logprobs is not None for s in sequences)
        raw = logits.log_softmax(dim=-1) if wants_logprobs else None
        self._sampler.adjust(logits, sequences)
        self._grammars.mask(logits, sequences)
        return self._sampler.choose(logits, sequences, raw)

    def _accept(self, sequence: Sequence, sampled: Sampled) -> RequestOutput:
        """Append a token to its sequence, which it may end."""
        sequence.token_ids.append(sampled.token_id)
        try:
            reason, is_text = self._judge(sequence, sampled.token_id)
        except BadGrammar as error:
            return self._end(sequence, FinishReason.ERROR, error)
        output = self._end(sequence, reason) if reason else sequence.output()
        if is_text:
            output.token_ids = [sampled.token_id]
        if sequence.request.sampling.logprobs is not None:
            output.logprobs = [sampled.logprob] if is_text and sampled.logprob else []
        return output

    def _judge(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, bool]:
        """Why the newest token ends its request, if it does, and whether it is part of the text.

        Raises BadGrammar when the request's grammar cannot be followed any further.
        """
        sampling = sequence.request.sampling
        matcher = self._grammars.matcher(sequence)
        is_text = token_id not in sequence.stop_ids
        is_complete = not is_text
        if matcher is not None:
            is_complete = matcher.accept(token_id) or is_complete
            is_text = is_text and token_id != matcher.eos_token_id
        if is_complete:
            return FinishReason.STOP, is_text
        is_full = sequence.num_tokens >= self._context_limit
        if is_full or sequence.num_generated == sampling.max_tokens:
            return FinishReason.LENGTH, True
        return None, True

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: EngineError | None = None
    ) -> RequestOutput:
        """Forget the sequence everywhere and say so."""
        output = sequence.output()
        output.finish_reason, output.error = reason, error
        sequence.has_ended = True
        # A step under way still writes to the sequence's pages: it releases them when it lands.
        if self._flight is None:
            self._release(sequence)
        self._sampler.remove(sequence)
        self._grammars.remove(sequence)
        request_id = output.request_id
        self._requests[request_id].remove(sequence)
        if not self._requests[request_id]:
            del self._requests[request_id]
            self._deadlines.remove(request_id)
            self._pins.note_end(request_id, self._clock())
        return output
