"""ActiveRequest: one request in a worker, from its job to its events and its DoneRecord.

It does no I/O: it gets the time as `now` and tokens as the engine's outputs, and returns events.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from contract.adapters.inspection import PROBE_ENDPOINT
from contract.messages.protocol import (
    DoneRecord,
    ErrorCode,
    FinishReason,
    GenerateJob,
    Tier,
    TokenEvent,
    Usage,
)
from engine.request import RequestOutput
from engine.text.codec import TextCodec
from worker.serving.choice import Choice
from worker.serving.engine_commands import Prompt, scored_top
from worker.serving.streams import EventUpdate

#: Largest number of log-probabilities that one request may have to send at a time: some 15 MB of
#: JSON.
MAX_LOGPROBS = 200_000
TOO_MANY_LOGPROBS = (
    f"This answer has more than {MAX_LOGPROBS:,} log-probabilities or token ids to send at one "
    "time. Ask for fewer, or for a stream."
)

#: Largest number of numbers in the vectors of one request: some 22 MB in base64.
MAX_NUMBERS = 1 << 22
TOO_MANY_NUMBERS = (
    f"The vectors of this request have more than {MAX_NUMBERS:,} numbers together. Send fewer "
    "inputs, or ask for fewer dimensions."
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Timings:
    """Unix seconds at which each happened; None: not yet."""

    taken_up: float
    loaded: float | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


class ActiveRequest:
    """Collects a request's tokens into events. Owned by the worker's event loop."""

    def __init__(
        self,
        job: GenerateJob,
        *,
        entry_id: bytes,
        lease: int,
        worker_id: str,
        codec: TextCodec,
        now: float,
        attempt: int = 1,
    ) -> None:
        self.job = job
        self.entry_id = entry_id
        self.lease = lease
        self.attempt = attempt
        self.timings = Timings(taken_up=now)
        self.in_engine = False
        self.held_digests: tuple[str, ...] = ()  # acquired from the adapter cache
        self.released = asyncio.Event()  # set when its adapters were released
        self.finish_reason: str | None = None
        self._worker_id = worker_id
        self._choices = [Choice(job, codec, index) for index in range(job.num_choices)]
        self._earlier = Usage()  # usage of lost attempts
        self._prompts: dict[int, tuple[int, int]] = {}  # number -> (tokens, cached ones)
        self._tier: Tier | None = None  # in which its slowest adapter was found
        self._on_device: dict[str, Any] = {}  # fields of a probe's last event
        self._seq = 0
        self._error: tuple[str, str, str | None] | None = None
        self._shown: list[Prompt] = []
        self._told: dict[str, Any] = {}

    @property
    def log_context(self) -> dict[str, Any]:
        """Return what every log line about it has."""
        context = {
            "request_id": self.job.request_id,
            "client_request_id": self.job.client_request_id,
            "tenant_id": self.job.tenant_id,
            "adapters": [ref.digest for ref in self.job.adapters],
            "attempt": self.attempt,
        }
        return {name: value for name, value in context.items() if value}

    @property
    def log_fields(self) -> dict[str, Any]:
        """Return what the log line at its end has."""
        record = self._done_record()
        fields = {
            "outcome": record.finish_reason,
            "code": record.error_code,
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "queue_ms": round(record.queue_ms, 1),
            "load_ms": round(record.load_ms, 1),
            "total_ms": round(record.total_ms, 1),
        }
        if record.tier is not None:
            fields["tier"] = record.tier
        if record.first_token_ms is not None:
            fields["first_token_ms"] = round(record.first_token_ms, 1)
        return self.log_context | {n: v for n, v in fields.items() if v is not None}

    def note_tier(self, tier: Tier) -> None:
        """Note where one of its adapters was found."""
        if self._tier is None or tier.rank > self._tier.rank:
            self._tier = tier

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def runs_on(self) -> bool:
        """Return whether the engine still works on any choice."""
        return self.in_engine and any(choice.runs_on for choice in self._choices)

    @property
    def generated(self) -> int:
        """Tokens that were generated, in all choices."""
        return self.usage.completion_tokens

    @property
    def usage(self) -> Usage:
        """Return what is billed; a prompt counts once for all its choices."""
        prompts, earlier = self._prompts.values(), self._earlier
        return Usage(
            prompt_tokens=sum(tokens for tokens, _ in prompts) or earlier.prompt_tokens,
            cached_tokens=sum(cached for _, cached in prompts) or earlier.cached_tokens,
            completion_tokens=earlier.completion_tokens
            + sum(choice.generated for choice in self._choices),
            thought_tokens=sum(choice.thought_tokens for choice in self._choices),
            accepted_drafts=_added(choice.accepted_drafts for choice in self._choices) or None,
            rejected_drafts=sum(choice.rejected_drafts for choice in self._choices),
        )

    def remember(self, usage: Usage) -> None:
        """Count the tokens that an earlier attempt has generated and reported."""
        self._earlier = usage

    @property
    def has_news(self) -> bool:
        """Return whether there is something to send; before the end only a stream gets tokens."""
        return self.is_finished or (
            self.job.stream and any(choice.has_news for choice in self._choices)
        )

    @property
    def is_begun(self) -> bool:
        """Return whether `take_news` has returned any event."""
        return self._seq > 0

    @property
    def is_urgent(self) -> bool:
        """Return whether its events must not wait for those of other requests."""
        return self.is_finished or not self.is_begun

    def show_prompts(self, prompts: list[Prompt]) -> None:
        """Begin each choice with what is asked of its prompt, now or when it is known."""
        self._shown = prompts
        for choice in self._choices:
            choice.begin(prompts[choice.index // self.job.n].token_ids)
        if self.job.echo and scored_top(self.job) is None:
            for choice in self._choices:
                choice.show(prompts[choice.index // self.job.n].text)

    def answer(self, told: dict[str, Any], now: float) -> None:
        """End the request with one event that has these fields; nothing was generated."""
        self._told = told
        self._end(FinishReason.STOP, now)

    def show_prompt_ids(self, prompts: list[list[int]]) -> None:
        """Send each prompt's tokens with its first choice."""
        for number, token_ids in enumerate(prompts):
            self._choices[number * self.job.n].show_prompt_ids(token_ids)

    def feed(self, output: RequestOutput, now: float, *, prompt: int = 0) -> int | None:
        """Take in what a step added to a choice of the given prompt.

        Returns the engine's index of a choice that ended at a stop string, so that the caller
        cancels it in the engine; None: there is none.
        """
        if output.num_prompt_tokens:
            self._prompts[prompt] = (output.num_prompt_tokens, output.num_cached_tokens)
        if output.adapter_bytes and self.job.endpoint == PROBE_ENDPOINT:
            load_ms = round(output.adapter_load_s * 1000, 3)
            self._on_device = {"adapter_bytes": output.adapter_bytes, "adapter_load_ms": load_ms}
        if output.token_ids and self.timings.first_token is None:
            self.timings.first_token = now
        if output.prompt_logprobs is not None:
            for index in range(self.job.n):
                own = self._choices[prompt * self.job.n + index]
                own.take_prompt(self._shown[prompt], output.prompt_logprobs)
        choice = self._choices[prompt * self.job.n + output.index]
        choice.feed(output)
        if output.error is not None:
            error = output.error
            self.fail(error.code, error.message, error.param, now=now)
        elif self._has_too_many_logprobs:
            param = "logprobs" if self.job.sampling.logprobs is not None else "return_token_ids"
            self.fail(ErrorCode.INVALID_REQUEST, TOO_MANY_LOGPROBS, param, now=now)
        elif sum(choice.num_numbers for choice in self._choices) > MAX_NUMBERS:
            self.fail(ErrorCode.INVALID_REQUEST, TOO_MANY_NUMBERS, "text", now=now)
        elif not self.awaits_check:
            self.conclude(now)
        return output.index if choice.finish_reason is not None and choice.runs_on else None

    @property
    def _has_too_many_logprobs(self) -> bool:
        if self.job.sampling.logprobs is None and not self.job.with_token_ids:
            return False
        return sum(choice.num_to_send for choice in self._choices) > MAX_LOGPROBS

    @property
    def awaits_check(self) -> bool:
        """Return whether all is generated, but an answer is not checked against its schema yet."""
        return not self.is_finished and self._is_generated and bool(self.unchecked)

    @property
    def unchecked(self) -> list[Choice]:
        """Return the choices whose answers are still to be checked against a schema."""
        return [choice for choice in self._choices if choice.awaits_check]

    @property
    def _is_generated(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def conclude(self, now: float) -> None:
        """End the request if all its choices have ended."""
        broken = [choice for choice in self._choices if choice.broken_param is not None]
        if broken:
            message = f"The answer does not obey its schema: {broken[0].schema_error}"
            self.fail(ErrorCode.ANSWER_INVALID, message, broken[0].broken_param, now=now)
        elif self._is_generated:
            self._end(_reason_of(self._choices), now)

    def cancel(self, now: float) -> None:
        """End the request because the client does not want the answer any more."""
        self._end(FinishReason.CANCELLED, now)

    def fail(self, code: str, message: str, param: str | None = None, *, now: float) -> None:
        if self.finish_reason is None:
            self._error = (code, message, param)
        self._end(FinishReason.ERROR, now)

    def _end(self, reason: str, now: float) -> None:
        if self.finish_reason is None:
            self.finish_reason = str(reason)
            self.timings.finished = now

    def take_news(self) -> list[EventUpdate]:
        """Return what happened since the last call, as the next events."""
        news = self.peek_news()
        self._seq += len(news)
        for choice in self._choices:
            if choice.has_news:
                choice.clear()
        return news

    def peek_news(self) -> list[EventUpdate]:
        """Return what `take_news` would return now: one event for each choice with news."""
        blank = TokenEvent(request_id=self.job.request_id, lease=self.lease, seq=self._seq)
        events = [self._event_of(choice, blank) for choice in self._choices if choice.has_news]
        if self._error is not None or (self.is_finished and not events):
            events = [self._final_event(blank)]
        usage = self.usage
        is_first = not self.is_begun and bool(events)
        queue_ms = round(self._waited_ms[0], 3) if is_first or self.is_finished else None
        if is_first:
            events[0] = dataclasses.replace(events[0], tier=self._tier, queue_ms=queue_ms)
        if self.is_finished:
            load_ms = round(self._waited_ms[1], 3)
            events[-1] = dataclasses.replace(
                events[-1], usage=usage, queue_ms=queue_ms, load_ms=load_ms, **self._on_device
            )
        return [
            EventUpdate(
                event=dataclasses.replace(event, seq=self._seq + number),
                entry_id=self.entry_id,
                emitted=usage.completion_tokens,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                done=self._done_record() if event.usage is not None else None,
            )
            for number, event in enumerate(events)
        ]

    def _event_of(self, choice: Choice, blank: TokenEvent) -> TokenEvent:
        event = choice.event(blank)
        if not self.job.with_counts:
            return event
        tokens, cached = self._prompts.get(choice.index // self.job.n, (0, 0))
        so_far = Usage(
            prompt_tokens=tokens,
            cached_tokens=cached,
            completion_tokens=choice.generated,
            thought_tokens=choice.thought_tokens,
        )
        return dataclasses.replace(event, so_far=so_far)

    def _final_event(self, blank: TokenEvent) -> TokenEvent:
        """Make the event that ends the whole request."""
        code, message, param = self._error or (None, None, None)
        return dataclasses.replace(
            blank,
            **self._told,
            finish_reason=self.finish_reason,
            error_code=code,
            error_message=message,
            error_param=param,
        )

    @property
    def _waited_ms(self) -> tuple[float, float]:
        """Return how long it waited in the queue, and for its adapters, in ms."""
        timings = self.timings
        started = timings.started or timings.finished or timings.taken_up
        load_ms = max(0.0, ((timings.loaded or timings.taken_up) - timings.taken_up) * 1000)
        return max(0.0, (started - self.job.created_at) * 1000 - load_ms), load_ms

    def _done_record(self) -> DoneRecord:
        job, timings, usage = self.job, self.timings, self.usage
        assert timings.finished is not None and self.finish_reason is not None

        def since_accepted(moment: float) -> float:
            return max(0.0, (moment - job.created_at) * 1000)

        queue_ms, load_ms = self._waited_ms
        first_token = timings.first_token
        return DoneRecord.of(
            job,
            worker_id=self._worker_id,
            lease=self.lease,
            attempts=self.attempt,
            finish_reason=self.finish_reason,
            error_code=self._error[0] if self._error else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=queue_ms,
            load_ms=load_ms,
            first_token_ms=None if first_token is None else since_accepted(first_token),
            total_ms=since_accepted(timings.finished),
            tier=self._tier,
            obeys_schema=_obeys_schema(self._choices),
            drafts=_drafts_of(usage),
        )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for own in counts:
        total.update(own)
    return dict(total)


def _drafts_of(usage: Usage) -> dict[str, int] | None:
    drafts = {**(usage.accepted_drafts or {}), "rejected": usage.rejected_drafts}
    return drafts if any(drafts.values()) else None


def _obeys_schema(choices: list[Choice]) -> bool | None:
    """Return whether all answers that were checked obey their schema; None: none was checked."""
    checked = [choice for choice in choices if choice.is_checked]
    return all(choice.schema_error is None for choice in checked) if checked else None


def _reason_of(choices: list[Choice]) -> str:
    """Return why a request ended: the first of cancelled, length, stop that any choice has."""
    reasons = {choice.finish_reason for choice in choices}
    for reason in (FinishReason.CANCELLED, FinishReason.LENGTH):
        if reason in reasons:
            return reason
    return FinishReason.STOP
