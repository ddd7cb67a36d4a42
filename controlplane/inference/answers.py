"""OpenAI's response bodies, whole and in chunks. Pure: events in, JSON out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

from worker.protocol import TokenEvent, Usage

DONE = b"data: [DONE]\n\n"
#: A comment: clients skip it, proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


class Answer(Protocol):
    """How one endpoint writes what the events say."""

    def whole(self, event: TokenEvent) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def opening(self) -> Iterable[bytes]:
        """What a stream begins with."""
        ...

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        """What one event adds to a stream."""
        ...


class _Stamped:
    """The fields that are the same in every body of one request."""

    object: str
    chunk_object: str

    def __init__(
        self, *, answer_id: str, created: int, model: str, fingerprint: str, with_usage: bool
    ) -> None:
        self._id = answer_id
        self._created = created
        self._model = model
        self._fingerprint = fingerprint
        self._with_usage = with_usage

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            **more,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        # With usage asked for, every chunk says that it is not the one that has it.
        more = {"usage": None} if self._with_usage else {}
        return sse(self._body(self.chunk_object, [choice], **more))

    def _usage_chunk(self, event: TokenEvent) -> Iterable[bytes]:
        if self._with_usage and event.usage is not None:
            yield sse(self._body(self.chunk_object, [], usage=usage_body(event.usage)))


class ChatAnswer(_Stamped):
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, event: TokenEvent) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": event.text,
            "refusal": None,
            "annotations": [],
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(event),
            "finish_reason": event.finish_reason,
        }
        return self._body(self.object, [choice], usage=usage_body(event.usage or Usage()))

    def opening(self) -> Iterable[bytes]:
        yield self._chunk(_delta({"role": "assistant", "content": "", "refusal": None}))

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        if event.text or event.logprobs:
            yield self._chunk(_delta({"content": event.text}, self._logprobs(event)))
        if event.finish_reason:
            yield self._chunk(_delta({}, finish_reason=event.finish_reason))
        yield from self._usage_chunk(event)

    @staticmethod
    def _logprobs(event: TokenEvent) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        return {"content": list(event.logprobs), "refusal": None}


def _delta(
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionAnswer(_Stamped):
    """/v1/completions."""

    object = chunk_object = "text_completion"
    _offset = 0

    def whole(self, event: TokenEvent) -> dict[str, Any]:
        choice = self._choice(event, event.finish_reason)
        return self._body(self.object, [choice], usage=usage_body(event.usage or Usage()))

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        if event.text or event.logprobs or event.finish_reason:
            yield self._chunk(self._choice(event, event.finish_reason))
        yield from self._usage_chunk(event)

    def _choice(self, event: TokenEvent, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": 0,
            "text": event.text,
            "logprobs": self._logprobs(event),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, event: TokenEvent) -> dict[str, Any] | None:
        """The older shape: parallel lists, the best tokens as a map."""
        if event.logprobs is None:
            return None
        offsets = []
        for entry in event.logprobs:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in event.logprobs],
            "token_logprobs": [entry["logprob"] for entry in event.logprobs],
            "top_logprobs": [
                {best["token"]: best["logprob"] for best in entry["top_logprobs"]}
                for entry in event.logprobs
            ],
            "text_offset": offsets,
        }
