"""Write a response, whole and as the events of its stream. Pure but for the clock: a worker's
events in, JSON out.

As OpenAI's, the stream has each item and part when it begins, piece by piece, and when it is done;
`response.completed` has the whole again.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from contract.messages.protocol import FinishReason, TokenEvent, Usage
from contract.messages.tool_calls import CallReader, Piece
from controlplane.errors import ApiError
from controlplane.inference.answers import drafts_body, one_line
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.service import Generation

Json = dict[str, Any]


@dataclasses.dataclass(slots=True)
class _Item:
    """One item of the output while it grows; of a message or a thought `parts` is its text."""

    index: int
    body: Json
    parts: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[Json] = dataclasses.field(default_factory=list)

    @property
    def type(self) -> str:
        return str(self.body["type"])

    @property
    def part(self) -> Json:
        """Return the only part of its content so far."""
        text = "".join(self.parts)
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return _text_part(text, self.logprobs)

    def finished(self, status: str) -> Json:
        if self.type == "function_call":
            return {**self.body, "arguments": "".join(self.parts), "status": status}
        return {**self.body, "content": [self.part], "status": status}


def _text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponsesAnswer:
    """Writes one request's events.

    has_tools     whether the text may be calls of tools
    service_tier  that the request got
    clock         Unix seconds, for the time of completion
    """

    def __init__(
        self,
        body: ResponsesBody,
        *,
        response_id: str,
        created: int,
        model: str,
        has_tools: bool,
        service_tier: str = "default",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._body = body
        self._id = response_id
        self._created = created
        self._model = model
        self._service_tier = service_tier
        self._clock = clock
        self._reader = CallReader() if has_tools else None
        self._sequence = 0
        self._done: list[Json] = []
        self._open: _Item | None = None
        self._untold: list[Json] = []  # log-probabilities of tokens whose text is still to come

    def whole(self, events: Iterable[TokenEvent]) -> Json:
        """Return the response when it is not streamed."""
        told = [data for event in events for data in self._events(event)]
        response: Json = told[-1]["response"]
        return response

    def opening(self) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._sse({"type": kind, "response": self._response("in_progress", [])})

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        for data in self._events(event):
            yield self._sse(data)

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a failed stream; clients raise the last one."""
        told = error.body()["error"]
        failed = self._response("failed", self._done)
        failed["error"] = {"code": "server_error", "message": error.message}
        event = {**told, "type": "error", "error": told}
        return self._sse({"type": "response.failed", "response": failed}) + self._sse(event)

    def _sse(self, data: Json) -> bytes:
        data = {**data, "sequence_number": self._sequence}
        self._sequence += 1
        return f"event: {data['type']}\ndata: ".encode() + one_line(data) + b"\n\n"

    def _events(self, event: TokenEvent) -> Iterator[Json]:
        is_end = event.finish_reason is not None
        if self._body.shows_logprobs:
            self._untold += event.logprobs or ()
        if event.thought:
            yield from self._think(event.thought)
        for piece in self._pieces(event.text, is_end=is_end):
            yield from self._add(piece)
        if is_end:
            yield from self._finish(event)

    def _pieces(self, text: str, *, is_end: bool) -> list[Piece]:
        if self._reader is None:
            return [Piece(text)] if text else []
        pieces = self._reader.feed(text)
        return pieces + self._reader.finish() if is_end else pieces

    def _add(self, piece: Piece) -> Iterator[Json]:
        if piece.name is not None:
            yield from self._close()
            yield from self._begin_call(piece)
        elif piece.call is None and (self._open is None or self._open.type != "message"):
            yield from self._close()
            yield from self._begin_message()
        item = self._open
        assert item is not None
        if not piece.text:
            return
        item.parts.append(piece.text)
        logprobs, self._untold = self._untold, []
        item.logprobs += logprobs
        if item.type == "message":
            yield self._part_event("output_text.delta", item, delta=piece.text, logprobs=logprobs)
        else:
            yield self._item_event("function_call_arguments.delta", item, delta=piece.text)

    def _think(self, text: str) -> Iterator[Json]:
        if self._open is None:
            thought = {"id": f"rs_{secrets.token_hex(24)}", "type": "reasoning", "summary": []}
            yield from self._begin_content(thought)
        assert self._open is not None
        self._open.parts.append(text)
        yield self._part_event("reasoning_text.delta", self._open, delta=text)

    def _begin_message(self) -> Iterator[Json]:
        message = {"id": f"msg_{secrets.token_hex(24)}", "type": "message", "role": "assistant"}
        yield from self._begin_content(message)

    def _begin_content(self, body: Json) -> Iterator[Json]:
        item = self._open = _Item(len(self._done), body)
        yield self._added(item, {**body, "status": "in_progress", "content": []})
        yield self._part_event("content_part.added", item, part=item.part)

    def _begin_call(self, piece: Piece) -> Iterator[Json]:
        call = {
            "id": f"fc_{secrets.token_hex(24)}",
            "type": "function_call",
            "call_id": piece.call_id,
            "name": piece.name,
        }
        item = self._open = _Item(len(self._done), call)
        yield self._added(item, {**call, "arguments": "", "status": "in_progress"})

    def _close(self, status: str = "completed") -> Iterator[Json]:
        item = self._open
        if item is None:
            return
        self._open = None
        shown, text = item.finished(status), "".join(item.parts)
        if item.type == "function_call":
            more = {"name": item.body["name"], "arguments": text}
            yield self._item_event("function_call_arguments.done", item, **more)
        else:
            if item.type == "message":
                yield self._part_event("output_text.done", item, text=text, logprobs=item.logprobs)
            else:
                yield self._part_event("reasoning_text.done", item, text=text)
            yield self._part_event("content_part.done", item, part=item.part)
        self._done.append(shown)
        yield {"type": "response.output_item.done", "output_index": item.index, "item": shown}

    def _finish(self, event: TokenEvent) -> Iterator[Json]:
        is_cut = event.finish_reason == FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        if self._open is None and not self._done:
            yield from self._begin_message()
        if self._open is not None:
            self._open.logprobs += self._untold
        yield from self._close(status)
        response = self._response(status, self._done, event.usage or Usage())
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = max(self._created, int(self._clock()))
        if event.schema_error is not None:
            response["schema_error"] = event.schema_error
        yield {"type": f"response.{status}", "response": response}

    @staticmethod
    def _added(item: _Item, shown: Json) -> Json:
        return {"type": "response.output_item.added", "output_index": item.index, "item": shown}

    @staticmethod
    def _item_event(kind: str, item: _Item, **fields: Any) -> Json:
        place = {"item_id": item.body["id"], "output_index": item.index}
        return {"type": f"response.{kind}", **place, **fields}

    def _part_event(self, kind: str, item: _Item, **fields: Any) -> Json:
        return self._item_event(kind, item, content_index=0, **fields)

    def _response(self, status: str, output: list[Json], usage: Usage | None = None) -> Json:
        body = self._body
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice
        shown_choice = choice or "auto" if isinstance(choice, str | None) else choice.model_dump()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "conversation": None,
            "error": None,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": body.presence_penalty or 0.0,
            "previous_response_id": None,
            "prompt": None,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": self._service_tier,
            "store": bool(body.store),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": shown_choice,
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if usage is None else usage_body(usage),
            "user": body.user,
        }


def answer_of(body: ResponsesBody, generation: Generation) -> ResponsesAnswer:
    """Return the writer of an accepted request's events."""
    job = generation.job
    return ResponsesAnswer(
        body,
        response_id=f"resp_{job.request_id.removeprefix('req_')}",
        created=int(job.created_at),
        model=generation.model.name,
        has_tools=bool(job.tools),
        service_tier=generation.body.tier,
    )


def usage_body(usage: Usage) -> Json:
    has_drafts = usage.accepted_drafts or usage.rejected_drafts
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens}
        | (drafts_body(usage) if has_drafts else {}),
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
