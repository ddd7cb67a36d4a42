"""One request inside a worker: from its job to its events, and in the end its one DoneRecord.

Pure: the clock comes in as `now`, tokens as the engine's outputs, and what to send goes out.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from worker.channel import Logprob, Output
from worker.protocol import DoneRecord, FinishReason, GenerateJob, TokenEvent, Usage
from worker.streams import News
from worker.text import Detokenizer, StopStrings, TextCodec


@dataclasses.dataclass(slots=True, kw_only=True)
class Timings:
    """Unix seconds at which things happened; None: not yet."""

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
    ) -> None:
        self.job = job
        self.entry_id = entry_id
        self.lease = lease
        self.timings = Timings(taken_up=now)
        self.in_engine = False
        self.held_digests: tuple[str, ...] = ()  # acquired from the adapter cache
        self.released = asyncio.Event()  # what it held was given back
        self.finish_reason: str | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated = 0
        self._worker_id = worker_id
        self._codec = codec
        self._detokenizer = Detokenizer(codec)
        self._stops = StopStrings(job.sampling.stop)
        self._stop_string: str | None = None
        self._seq = 0
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._error: tuple[str, str, str | None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to send. Only a stream is told of tokens before the end."""
        return self.is_finished or (self.job.stream and bool(self._text or self._logprobs))

    @property
    def is_urgent(self) -> bool:
        """Whether its news should not wait for other requests'."""
        return self.is_finished or self._seq == 0

    def feed(self, output: Output, now: float) -> None:
        """Take in what a step added. Afterwards `is_finished` may be true while the engine goes
        on, because a stop string was met."""
        self.prompt_tokens = output.num_prompt_tokens or self.prompt_tokens
        self.cached_tokens = output.num_cached_tokens or self.cached_tokens
        self.generated = max(self.generated, output.num_generated)
        if output.token_ids and self.timings.first_token is None:
            self.timings.first_token = now
        text, self._stop_string = self._stops.feed(self._read(output))
        self._text += text
        if self._stop_string is not None:
            self._end(FinishReason.STOP, now)
        elif output.failure is not None:
            failure = output.failure
            self.fail(failure.code, failure.message, failure.param, now=now)
        elif output.finish_reason is not None:
            self._finish_text(output.finish_reason, now)

    def _read(self, output: Output) -> str:
        """The text of an output's tokens; what is to be told of each token is kept."""
        if not output.logprobs or self.job.sampling.logprobs is None:
            return self._detokenizer.feed(output.token_ids)
        if not self.job.token_details:
            self._logprobs += [self._logprob(entry) for entry in output.logprobs]
            return self._detokenizer.feed(output.token_ids)
        pieces = [self._detokenizer.feed([token_id]) for token_id in output.token_ids]
        for piece, entry in zip(pieces, output.logprobs, strict=True):
            self._logprobs.append(self._logprob(entry) | {"text": piece})
        return "".join(pieces)

    def _finish_text(self, reason: str, now: float) -> None:
        text, self._stop_string = self._stops.feed(self._detokenizer.finish())
        is_stopped = self._stop_string is not None
        self._text += text if is_stopped else text + self._stops.finish()
        self._end(FinishReason.STOP if is_stopped else reason, now)

    def cancel(self, now: float) -> None:
        """End it because nobody wants the answer."""
        self._end(FinishReason.CANCELLED, now)

    def fail(self, code: str, message: str, param: str | None = None, *, now: float) -> None:
        self._error = (code, message, param)
        self._end(FinishReason.ERROR, now)

    def _end(self, reason: str, now: float) -> None:
        if self.finish_reason is None:
            self.finish_reason = str(reason)
            self.timings.finished = now

    def take_news(self) -> News:
        """What happened since the last call, as the next event."""
        news = self.peek_news()
        self._seq += 1
        self._text = ""
        self._logprobs = []
        return news

    def peek_news(self) -> News:
        """What `take_news` would give now."""
        code, message, param = self._error or (None, None, None)
        event = TokenEvent(
            request_id=self.job.request_id,
            lease=self.lease,
            seq=self._seq,
            text=self._text,
            logprobs=tuple(self._logprobs) or None,
            finish_reason=self.finish_reason,
            stop_string=self._stop_string,
            error_code=code,
            error_message=message,
            error_param=param,
            usage=self._usage() if self.is_finished else None,
        )
        return News(
            event=event,
            entry_id=self.entry_id,
            emitted=self.generated,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            done=self._done_record() if self.is_finished else None,
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.generated,
        )

    def _done_record(self) -> DoneRecord:
        job, timings = self.job, self.timings
        assert timings.finished is not None and self.finish_reason is not None

        def since_accepted(moment: float) -> float:
            return max(0.0, (moment - job.created_at) * 1000)

        started = timings.started or timings.finished
        load_ms = max(0.0, ((timings.loaded or timings.taken_up) - timings.taken_up) * 1000)
        first_token = timings.first_token
        return DoneRecord(
            request_id=job.request_id,
            tenant_id=job.tenant_id,
            api_key_id=job.api_key_id,
            worker_id=self._worker_id,
            lease=self.lease,
            model=job.model,
            base_model=job.base_model,
            adapter_version_id=job.adapter_version_id,
            digests=tuple(ref.digest for ref in job.adapters),
            finish_reason=self.finish_reason,
            error_code=self._error[0] if self._error else None,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.generated,
            created_at=job.created_at,
            queue_ms=max(0.0, since_accepted(started) - load_ms),
            load_ms=load_ms,
            first_token_ms=None if first_token is None else since_accepted(first_token),
            total_ms=since_accepted(timings.finished),
            stream=job.stream,
            endpoint=job.endpoint,
            is_batch=job.is_batch,
        )

    def _logprob(self, entry: Logprob) -> dict[str, Any]:
        token_id, logprob, top = entry
        shown = self._token(token_id, logprob)
        return shown | {"top_logprobs": [self._token(*alternative) for alternative in top]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        shown = {
            "token": self._codec.token_text(token_id),
            "logprob": max(logprob, -9999.0),  # -inf is no JSON
            "bytes": self._codec.token_bytes(token_id),
        }
        if self.job.token_details:
            shown |= {"id": token_id, "special": self._codec.is_special(token_id)}
        return shown
