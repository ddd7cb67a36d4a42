"""The events of one request, in order, each exactly once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from contract.messages.protocol import ErrorCode, FinishReason, GenerateJob, TokenEvent
from contract.queue.reply_streams import is_batch_stream
from controlplane.errors import ApiError, Unavailable, from_worker
from controlplane.requestlog.recorder import Transcript

#: Unread events of one request; with more its client reads too slowly.
MAX_UNREAD_EVENTS = 4096


class Reply:
    """The events of one request on their way to its client.

    Drops events of an old lease and repeated ones. When an attempt was lost before its client saw
    any of it, the events of the next attempt replace its own.

    transcript  keeps the texts for the request log; None: nothing does
    """

    def __init__(self, job: GenerateJob, transcript: Transcript | None = None) -> None:
        self.request_id = job.request_id
        self.is_accepted = False  # the queue has it, so far as is known here
        self.is_ended = False
        self.first_at: float | None = None  # seconds of the event loop's clock
        self.last: TokenEvent | None = None
        #: Figures of the first event: how long it waited, and where its slowest adapter was found.
        self.queue_ms: float | None = None
        self.tier: str | None = None
        self.is_forgotten = False  # Redis has lost it
        #: True if the job keeps running when its client leaves: somebody else will read the answer.
        self.goes_on = is_batch_stream(job.gateway_id)
        self.note_heard()
        self._has_one_choice = job.num_choices == 1
        self._max_unread = MAX_UNREAD_EVENTS * job.num_choices
        self._transcript = transcript
        self._lease = 0
        self._next_seq = 0
        self._is_begun = False  # the client has been given some of it
        self._unread: list[TokenEvent] = []
        self._failure: ApiError | None = None
        self._wake = asyncio.Event()

    def note_heard(self) -> None:
        """Note that something was heard of the request."""
        self.heard_at = asyncio.get_running_loop().time()

    def note_accepted(self) -> None:
        """Note that the queue has the request; silence counts from now."""
        self.is_accepted = True
        self.note_heard()

    def push(self, event: TokenEvent) -> None:
        """Take in an event from the stream. Raises ApiError when the reply cannot be continued."""
        self.note_heard()
        if event.lease < self._lease or self.is_ended:
            return
        if event.lease > self._lease:
            if self._is_begun and not self._is_last(event):
                raise Unavailable("The answer was interrupted.", code=ErrorCode.WORKER_LOST)
            self._lease, self._next_seq = event.lease, 0
            self._unread.clear()
            if self._transcript is not None:
                self._transcript.restart()
        if event.seq < self._next_seq:
            return
        if event.seq > self._next_seq or len(self._unread) >= self._max_unread:
            raise Unavailable("Part of the answer was lost.", code=ErrorCode.WORKER_LOST)
        self._next_seq += 1
        if self.first_at is None:
            self.first_at = self.heard_at
        if event.seq == 0:
            self.queue_ms, self.tier = event.queue_ms, event.tier
        self._unread.append(event)
        if self._transcript is not None:
            self._transcript.add(event)
        if self._is_last(event):
            self.last = event
            self._end(event.finish_reason or FinishReason.STOP)
        self._wake.set()

    def _end(self, finish_reason: str) -> None:
        if not self.is_ended and self._transcript is not None:
            self._transcript.end(finish_reason)
        self.is_ended = True

    def log_fields(self, began: float) -> dict[str, Any]:
        """Return how it ended, its tokens and its times, as a log line has them."""
        fields: dict[str, Any] = {}
        last, failure = self.last, self._failure
        if failure is not None:
            fields |= {"outcome": "failed", "code": failure.code}
        elif last is None:
            fields["outcome"] = "client_left"
        elif last.error_code is not None:
            fields["code"] = last.error_code
            if from_worker(last.error_code, "", None).status >= 500:
                fields["outcome"] = "failed"
        if last is not None:
            fields["queue_ms"] = last.queue_ms
            fields |= {} if self.tier is None else {"tier": self.tier}
            fields |= dataclasses.asdict(last.usage) if last.usage is not None else {}
        if self.first_at is not None:
            fields["first_token_ms"] = round((self.first_at - began) * 1000, 1)
        return fields

    def abandon(self) -> None:
        """End the reply because nobody waits for it."""
        self._end(FinishReason.CANCELLED)

    def _is_last(self, event: TokenEvent) -> bool:
        """Return whether nothing follows; the end of a request's only choice is the request's."""
        if event.usage is not None or event.error_code is not None:
            return True
        return self._has_one_choice and event.finish_reason is not None

    def fail(self, error: ApiError) -> None:
        """End the reply; whoever takes next gets the error."""
        self._failure = error
        self._end(FinishReason.ERROR)
        self._wake.set()

    async def take(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Wait for unread events and return them, one for each choice; [] if none came in time.

        Raises ApiError when the request failed, in the worker or on the way.
        """
        if not self._unread and self._failure is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        self._wake.clear()
        events, self._unread = self._unread, []
        if not events:
            assert self._failure is not None
            raise self._failure
        self._is_begun = True
        for event in events:
            if event.error_code is not None:
                raise from_worker(event.error_code, event.error_message or "", event.error_param)
        return _merged(events)


def _merged(events: list[TokenEvent]) -> list[TokenEvent]:
    """Return one event for each choice, in the order of their last events."""
    by_choice: dict[int, list[TokenEvent]] = {}
    for event in events:
        of_choice = by_choice.pop(event.index, [])
        of_choice.append(event)
        by_choice[event.index] = of_choice
    return [_joined(of_choice) for of_choice in by_choice.values()]


def _joined(events: list[TokenEvent]) -> TokenEvent:
    if len(events) == 1:
        return events[0]
    logprobs = tuple(entry for event in events for entry in event.logprobs or ())
    text, thought = ("".join(getattr(e, name) for e in events) for name in ("text", "thought"))
    prompt = next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None)
    last = events[-1]
    shows_ids = last.token_ids is not None
    token_ids = tuple(id for event in events for id in event.token_ids or ()) if shows_ids else None
    first = next((e for e in events if e.prompt_token_ids is not None), last)
    return dataclasses.replace(
        last,
        text=text,
        thought=thought,
        logprobs=logprobs or None,
        prompt_logprobs=prompt,
        token_ids=token_ids,
        prompt_token_ids=first.prompt_token_ids,
    )
