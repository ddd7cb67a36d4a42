"""Write OpenAI's response bodies, whole and in chunks. Pure: events in, JSON out."""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from contract.messages.protocol import FinishReason, TokenEvent, Usage
from contract.messages.tool_calls import CallReader, Piece

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"


def one_line(data: Json) -> bytes:
    """Write JSON without any character that some client takes for the end of a line."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    if not text.isascii():
        for character, escaped in _LINE_ENDS:
            text = text.replace(character, escaped)
    return text.encode()


#: Not escaped by JSON; Python's `splitlines`, and so httpx, ends a line at each.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def sse(data: Json) -> bytes:
    """Write one server-sent event."""
    return b"data: " + one_line(data) + b"\n\n"


def usage_body(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.thought_tokens,
            "audio_tokens": 0,
            **drafts_body(usage),
        },
    }


def drafts_body(usage: Usage) -> Json:
    """Return the counts of drafts: OpenAI's two, and ours by source if there were any."""
    accepted = usage.accepted_drafts or {}
    counts: Json = {
        "accepted_prediction_tokens": sum(accepted.values()),
        "rejected_prediction_tokens": usage.rejected_drafts,
    }
    return counts | ({"accepted_by_source": accepted} if accepted else {})


class Answer:
    """Writes the events of one request as an endpoint's bodies.

    answer_id, created, model, service_tier, fingerprint  the same in every body
    with_usage   whether a stream ends with a chunk that has the usage
    num_choices  of the request
    has_tools    whether the text may be calls of tools
    """

    object: str
    chunk_object: str
    #: Whether each chunk of a stream has the usage of its choice so far.
    is_continuous = False
    #: Choices of each prompt.
    per_prompt = 1

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        with_usage: bool,
        num_choices: int = 1,
        has_tools: bool = False,
        service_tier: str | None = None,
    ) -> None:
        tier = {} if service_tier is None else {"service_tier": service_tier}
        self._id = answer_id
        self._stamp = {
            "created": created,
            "model": model,
            **tier,
            "system_fingerprint": fingerprint,
        }
        self._with_usage = with_usage
        self._num_choices = num_choices
        self._readers = [CallReader() for _ in range(num_choices)] if has_tools else None

    def whole(self, events: Iterable[TokenEvent]) -> Json:
        """Return the body of an answer that is not streamed, from all its events."""
        events = list(events)
        of_choice: dict[int, list[TokenEvent]] = {}
        usage = Usage()
        for event in events:
            of_choice.setdefault(event.index, []).append(event)
            usage = event.usage or usage
        choices = [
            self._choice(index, of_choice[index]) | _token_ids(of_choice[index])
            for index in sorted(of_choice)
        ]
        more = self._of_prompt(of_choice[min(of_choice)])
        body = self._body(self.object, choices, usage=usage_body(usage), **more)
        prompts = {
            event.index // self.per_prompt: list(event.prompt_token_ids)
            for event in events
            if event.prompt_token_ids is not None
        }
        return self._with_prompts(body, prompts) if prompts else body

    def _of_prompt(self, events: Sequence[TokenEvent]) -> Json:
        """Return what a whole body says of the prompt that its choices have in common."""
        return {}

    def _with_prompts(self, body: Json, prompts: dict[int, list[int]]) -> Json:
        """Return the body with the token ids of the prompts, by their numbers."""
        raise NotImplementedError

    def opening(self) -> Iterable[bytes]:
        """Return what a stream begins with."""
        return ()

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        """Return what one event adds to a stream."""
        ids = _token_ids([event])
        prompts = {}
        if event.prompt_token_ids is not None:
            prompts = {event.index // self.per_prompt: list(event.prompt_token_ids)}
        for choice in self._deltas(event):
            shown = {"index": event.index, **choice, **ids}
            body = self._body(self.chunk_object, [shown], **self._usage_so_far(event))
            yield sse(self._with_prompts(body, prompts) if prompts else body)
            ids = {"token_ids": []} if ids else {}
            prompts = {}
        if self._with_usage and event.usage is not None:
            yield sse(self._body(self.chunk_object, [], usage=usage_body(event.usage)))

    def _usage_so_far(self, event: TokenEvent) -> Json:
        """Return a chunk's usage: None before the last chunk, or up to here if asked for."""
        if self.is_continuous and event.so_far is not None:
            return {"usage": usage_body(event.so_far)}
        return {"usage": None} if self._with_usage else {}

    def _choice(self, index: int, events: Sequence[TokenEvent]) -> Json:
        """Return one finished choice."""
        raise NotImplementedError

    def _deltas(self, event: TokenEvent) -> Iterator[Json]:
        """Return what an event adds to a streamed choice, without its index."""
        raise NotImplementedError

    def _body(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {"id": self._id, "object": kind, **self._stamp, "choices": choices, **more}


def _text(events: Sequence[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def _entries(events: Sequence[TokenEvent]) -> list[Json] | None:
    """Return the tokens' log-probabilities; None if they were not asked for."""
    if all(event.logprobs is None for event in events):
        return None
    return [entry for event in events for entry in event.logprobs or ()]


def _prompt_logprobs(events: Sequence[TokenEvent]) -> Json:
    """Return the prompt's log-probabilities in vLLM's form; {} if they were not asked for."""
    found = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    if not found:
        return {}
    return {"prompt_logprobs": [_by_id(entry) for each in found for entry in each]}


def _by_id(entry: Json) -> Json | None:
    """Return the alternatives of a prompt's token by id; None for the first token."""
    if entry["logprob"] is None:
        return None
    best = [own | {"rank": rank} for rank, own in enumerate(entry["top_logprobs"], start=1)]
    return {
        str(own["id"]): {
            "logprob": own["logprob"],
            "rank": own["rank"],
            "decoded_token": own["token"],
        }
        for own in (entry, *best)
    }


def _token_ids(events: Sequence[TokenEvent]) -> Json:
    """Return the token ids of a choice, if they were asked for."""
    if all(event.token_ids is None for event in events):
        return {}
    return {"token_ids": [token_id for event in events for token_id in event.token_ids or ()]}


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    object = "chat.completion"
    _has_begun = False
    chunk_object = "chat.completion.chunk"

    def _of_prompt(self, events: Sequence[TokenEvent]) -> Json:
        return _prompt_logprobs(events)

    def _choice(self, index: int, events: Sequence[TokenEvent]) -> Json:
        message: Json = {
            "role": "assistant",
            "content": _text(events),
            "refusal": None,
            "annotations": [],
        }
        if thought := "".join(event.thought for event in events):
            message["reasoning_content"] = thought
        if self._readers is not None:
            message |= _with_calls(self._pieces(index, message["content"], is_end=True))
        return {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(events),
            "finish_reason": self._reason(index, events[-1].finish_reason),
            **_schema_error(events[-1]),
        }

    def _pieces(self, index: int, text: str, *, is_end: bool) -> list[Piece]:
        """Return what more text of a choice adds to its content and its calls."""
        if self._readers is None:
            return [Piece(text)] if text else []
        reader = self._readers[index]
        pieces = reader.feed(text)
        return pieces + reader.finish() if is_end else pieces

    def _reason(self, index: int, reason: str | None) -> str | None:
        has_calls = self._readers is not None and self._readers[index].num_calls > 0
        return "tool_calls" if has_calls and reason == FinishReason.STOP else reason

    def _with_prompts(self, body: Json, prompts: dict[int, list[int]]) -> Json:
        return {**body, "prompt_token_ids": next(iter(prompts.values()))}

    def opening(self) -> Iterable[bytes]:
        # With usage in every chunk, this one waits for the first event, which has the prompt's.
        return () if self.is_continuous else self._roles(None)

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        if self.is_continuous and not self._has_begun:
            self._has_begun = True
            before = dataclasses.replace(event.so_far or Usage(), completion_tokens=0)
            yield from self._roles(before)
        yield from super().chunks(event)

    def _roles(self, usage: Usage | None) -> Iterator[bytes]:
        """Return a chunk for each choice, with the role."""
        more: Json = {"usage": None} if self._with_usage else {}
        if usage is not None:
            more = {"usage": usage_body(usage)}
        # Where it may be calls alone, nothing is said of content until there is some.
        content = "" if self._readers is None else None
        for index in range(self._num_choices):
            delta = _delta({"role": "assistant", "content": content, "refusal": None})
            yield sse(self._body(self.chunk_object, [{"index": index, **delta}], **more))

    def _deltas(self, event: TokenEvent) -> Iterator[Json]:
        is_end = event.finish_reason is not None
        deltas = [_piece_delta(p) for p in self._pieces(event.index, event.text, is_end=is_end)]
        if event.thought:
            deltas.insert(0, {"reasoning_content": event.thought})
        if not deltas and (event.logprobs or event.token_ids):
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            yield _delta(delta, _chat_logprobs([event]) if number == 0 else None)
        if is_end:
            reason = self._reason(event.index, event.finish_reason)
            yield _delta({}, finish_reason=reason) | _schema_error(event)


def _schema_error(event: TokenEvent) -> Json:
    """Return how a finished answer breaks a schema that is not strict, if it does."""
    return {} if event.schema_error is None else {"schema_error": event.schema_error}


def _piece_delta(piece: Piece) -> Json:
    """Write a piece of a message as a chunk has it."""
    if piece.call is None:
        return {"content": piece.text}
    call: Json = {"index": piece.call}
    if piece.name is not None:
        call |= {"id": piece.call_id, "type": "function"}
        call["function"] = {"name": piece.name, "arguments": ""}
    else:
        call["function"] = {"arguments": piece.text}
    return {"tool_calls": [call]}


def _with_calls(pieces: Iterable[Piece]) -> Json:
    """Join the pieces of a message into its content and calls."""
    content = ""
    calls: list[Json] = []
    for piece in pieces:
        if piece.call is None:
            content += piece.text
        elif piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        else:
            calls[piece.call]["function"]["arguments"] += piece.text
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _chat_logprobs(events: Sequence[TokenEvent]) -> Json | None:
    entries = _entries(events)
    return None if entries is None else {"content": entries, "refusal": None}


def _delta(delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionAnswer(Answer):
    """/v1/completions."""

    object = chunk_object = "text_completion"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._offsets = [_Offsets() for _ in range(self._num_choices)]

    def _choice(self, index: int, events: Sequence[TokenEvent]) -> Json:
        return {
            "index": index,
            "text": _text(events),
            "logprobs": self._logprobs(index, events),
            "finish_reason": events[-1].finish_reason,
            **_prompt_logprobs(events),
        }

    def _deltas(self, event: TokenEvent) -> Iterator[Json]:
        if event.text or event.logprobs or event.finish_reason:
            yield {
                "text": event.text,
                "logprobs": self._logprobs(event.index, [event]),
                "finish_reason": event.finish_reason,
            }

    def _with_prompts(self, body: Json, prompts: dict[int, list[int]]) -> Json:
        for choice in body["choices"]:
            choice["prompt_token_ids"] = prompts.get(choice["index"] // self.per_prompt)
        return body

    def _logprobs(self, index: int, events: Sequence[TokenEvent]) -> Json | None:
        """Write log-probabilities in the older shape: parallel lists, the best tokens as a map."""
        entries = _entries(events)
        if entries is None:
            return None
        return {
            "tokens": [_token_name(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries],
            "text_offset": [self._offsets[index].of(entry) for entry in entries],
        }


def _token_name(entry: Json) -> str:
    """Return a token's text, or as OpenAI does the bytes of one that is no whole characters."""
    content = bytes(entry["bytes"])
    try:
        content.decode()
    except UnicodeDecodeError:
        return "bytes:" + repr(content)[2:-1]
    return str(entry["token"])


def _by_text(entry: Json) -> dict[str, float] | None:
    """Return the log-probabilities of the chosen token and the best ones by their names.

    Of tokens with the same name the chosen one has it, or else the likeliest, and the others are
    named by their ids, as vLLM does. None for a prompt's first token.
    """
    if entry["logprob"] is None:
        return None
    chosen, found = _token_name(entry), dict[str, float]()
    for own in entry["top_logprobs"]:
        name = _token_name(own)
        is_taken = name == chosen and own.get("id") != entry.get("id")
        found[f"token_id:{own.get('id')}" if is_taken or name in found else name] = own["logprob"]
    found.setdefault(chosen, entry["logprob"])
    return found


class _Offsets:
    """The offsets of tokens in a choice's text; the tokens of one character have the same."""

    def __init__(self) -> None:
        self._next = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, entry: Json) -> int:
        if "span" in entry:
            start, self._next = entry["span"]
            return int(start)
        content = bytes(entry["bytes"])
        if content and not 0x80 <= content[0] < 0xC0:  # it does not continue a character
            self._next += len(self._decoder.decode(b"", final=True))
        here = self._next
        self._next += len(self._decoder.decode(content))
        return here
