"""RequestTable: the requests that have not ended.

It informs every other owner when a sequence enters, gives back its pages, or ends.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.adapters.store import AdapterStore
from engine.errors import EngineError
from engine.memory.pinned_prefixes import PinnedPrefixes
from engine.pending_finishes import PendingFinishes
from engine.request import FinishReason, Request, RequestOutput
from engine.sampling.failures import as_engine_error
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Sampled, Sampler
from engine.sampling.stopping import check_stop
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.scheduler import Scheduler
from engine.sequence import PooledPrompt, Sequence, Step
from engine.validation import RequestValidator


class RequestTable:
    """Owns the sequences of all requests, by request id.

    validator  knows what ends a request, and how its prompt is pooled
    clock     time in seconds, for deadlines
    """

    def __init__(
        self,
        *,
        store: AdapterStore,
        scheduler: Scheduler,
        sampler: Sampler,
        grammars: Grammars,
        deadlines: Deadlines,
        pins: PinnedPrefixes,
        validator: RequestValidator,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._scheduler, self._sampler = store, scheduler, sampler
        self._grammars, self._deadlines, self._pins = grammars, deadlines, pins
        self._validator, self._clock = validator, clock
        self._sequences: dict[str, list[Sequence]] = {}
        self._pending = PendingFinishes()
        self._num_arrivals = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def enter(self, request: Request) -> None:
        """Accept a request that has passed `RequestValidator.check`.

        If it raises, nothing of the request stays behind.
        """
        sequences = Sequence.of(request, self._num_arrivals, self._validator.stop_ids(request))
        try:
            for sequence in sequences:
                sequence.versions = self._store.versions(sequence.digests)
                if request.vector is not None:
                    sequence.pooled = PooledPrompt(
                        self._validator.pooling_of(request), request.vector
                    )
                self._sampler.add(sequence)
                self._grammars.add(sequence)
        except BaseException:
            for sequence in sequences:
                self._sampler.remove(sequence)
                self._grammars.remove(sequence)
            raise
        self._num_arrivals += len(sequences)
        self._sequences[request.request_id] = live = list(sequences)
        self._deadlines.add(live)
        now = self._clock()
        for sequence in sequences:
            self._store.add_user(sequence.digests)
            self._scheduler.add(sequence, now)

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's pages and adapters.

        A step in flight may still write to the pages: their next owner's writes are launched, or
        copied, after that step.
        """
        if not sequence.has_left:
            sequence.has_left = True
            self._scheduler.remove(sequence)
            self._store.remove_user(sequence.digests)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: EngineError | None = None,
        output: RequestOutput | None = None,
    ) -> RequestOutput:
        """Remove the sequence from every owner; return its last output.

        output  with the tokens of this step, if there are any
        """
        output = output or sequence.output()
        sequence.count(output)
        output.finish_reason, output.error = reason, error
        loads = self._store.loads_of(sequence.digests)
        output.adapter_bytes = sum(num_bytes for num_bytes, _ in loads)
        output.adapter_load_s = sum(seconds for _, seconds in loads)
        sequence.has_ended = True
        self.release(sequence)
        self._sampler.remove(sequence)
        self._grammars.remove(sequence)
        request_id = output.request_id
        self._sequences[request_id].remove(sequence)
        if not self._sequences[request_id]:
            del self._sequences[request_id]
            self._deadlines.remove(request_id)
            self._pins.note_end(request_id, self._clock())
        return output

    def accept(
        self, sequence: Sequence, sampled: Sampled, context_limit: int, output: RequestOutput
    ) -> None:
        """Add a sequence's newest token to its output, and end the sequence if that is due."""
        try:
            matcher = self._grammars.matcher(sequence)
            reason, is_text = check_stop(sequence, matcher, context_limit)
        except Exception as error:  # raised by the request's own matcher
            known = as_engine_error(sequence.request.request_id, error)
            self.finish(sequence, FinishReason.ERROR, known, output)
            return
        if is_text:
            output.token_ids.append(sampled.token_id)
        if sequence.request.sampling.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs += [sampled.logprob] if is_text and sampled.logprob else []
            is_end = not is_text and reason is FinishReason.STOP
            output.end_logprob = sampled.logprob if is_end else None
        if sequence.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = sequence.prompt_logprobs.take()
        if sequence.pooled is not None:
            output.vector = sequence.pooled.vector
        if reason is not None:
            self.finish(sequence, reason, output=output)

    def finish_later(
        self,
        request_id: str,
        reason: FinishReason,
        error: BaseException | None = None,
        index: int | None = None,
    ) -> None:
        """Mark a request, or one of its n, to end at the next step unless it ends before."""
        known = None if error is None else as_engine_error(request_id, error)
        self._pending.add(self._sequences.get(request_id, ()), reason, known, index)

    def fail_unloadable(self) -> None:
        """Mark requests that wait for adapters that cannot be loaded to end."""
        if not self._store.has_failures:
            return
        for sequence in self._scheduler.waiting:
            for digest in sequence.digests:
                if (error := self._store.error(digest)) is not None:
                    self.finish_later(sequence.request.request_id, FinishReason.ERROR, error)

    @property
    def has_pending(self) -> bool:
        """Return whether `finish_pending` has anything to do."""
        return bool(self._pending)

    def finish_pending(self) -> list[RequestOutput]:
        """End the sequences that `finish_later` has marked."""
        return [self.finish(*each) for each in self._pending.take()]

    def finish_failed(self, step: Step) -> list[RequestOutput]:
        """End the sequences that the scheduler found unable to run."""
        return [
            self.finish(sequence, FinishReason.ERROR, error)
            for sequence, error in step.failed
            if not sequence.has_ended
        ]

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return a request's sequences that have not ended."""
        return list(self._sequences.get(request_id, ()))

    def all_sequences(self) -> set[Sequence]:
        return {sequence for sequences in self._sequences.values() for sequence in sequences}
