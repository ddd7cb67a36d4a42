"""LoRAX's answers, whole and streamed. Pure: events in, JSON out.

Other than in OpenAI's, every token is shown with its id, and the stop string that ended the answer
is part of its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from contract.messages.protocol import FinishReason, TokenEvent, Usage
from controlplane.inference.answers import one_line

Json = dict[str, Any]

#: What an answer says of its text apart from the details.
_OF_THE_TEXT = ("generated_text", "schema_error")


def sse(data: Json) -> bytes:
    """Write one event, without the space that OpenAI's have, as LoRAX does."""
    return b"data:" + one_line(data) + b"\n\n"


def finish_reason(event: TokenEvent) -> str:
    if event.finish_reason == FinishReason.LENGTH:
        return "length"
    return "eos_token" if event.stop_string is None else "stop_sequence"


def text_of(events: Iterable[TokenEvent]) -> str:
    return "".join(event.text + (event.stop_string or "") for event in events)


class LoraxAnswer:
    """Writes one request's events.

    prompt        what the text begins with, for `return_full_text`
    with_details  whether the client asked for them
    with_alternatives  whether each token comes with the likeliest ones in its place
    seed          of the sampling
    eos_token_id  of the token that ends an answer; events do not show it
    """

    def __init__(
        self,
        *,
        prompt: str,
        with_details: bool,
        with_alternatives: bool,
        seed: int | None,
        eos_token_id: int,
    ) -> None:
        self._prompt = prompt
        self._with_details = with_details
        self._with_alternatives = with_alternatives
        self._seed = seed
        self._eos_token_id = eos_token_id
        self._text: list[str] = []

    def whole(self, events: Sequence[TokenEvent], usage: Usage) -> Json:
        """Return the finished answer: the likeliest of several, the others in its details."""
        choices: dict[int, list[TokenEvent]] = {}
        for event in events:
            choices.setdefault(event.index, []).append(event)
        ranked = sorted(choices.values(), key=_mean_logprob, reverse=True)
        best, *others = [self._sequence(choice) for choice in ranked]
        answer = {name: best.pop(name) for name in _OF_THE_TEXT if name in best}
        if not self._with_details:
            return answer
        details = {
            **best,
            "prompt_tokens": usage.prompt_tokens,
        }
        if not others:
            details["generated_tokens"] = usage.completion_tokens
        else:
            details["best_of_sequences"] = others
        return {**answer, "details": details}

    def _sequence(self, events: list[TokenEvent]) -> Json:
        tokens = [token for event in events for token in self._tokens(event)]
        return {
            "generated_text": self._prompt + text_of(events),
            **_schema_error(events[-1]),
            "finish_reason": finish_reason(events[-1]),
            "generated_tokens": len(tokens),
            "seed": self._seed,
            "prefill": [],
            "tokens": tokens,
        }

    def opening(self) -> Iterable[bytes]:
        return ()

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        """Return what one event adds to a stream; the last token has the text and the details."""
        self._text.append(text_of([event]))
        tokens = list(self._tokens(event))
        for token in tokens[:-1]:
            yield _chunk(token)
        is_last = event.finish_reason is not None
        if tokens:
            yield self._last_chunk(tokens[-1], event) if is_last else _chunk(tokens[-1])

    def _last_chunk(self, token: Json, event: TokenEvent) -> bytes:
        usage = event.usage or Usage()
        details = {
            "finish_reason": finish_reason(event),
            "prompt_tokens": usage.prompt_tokens,
            "generated_tokens": usage.completion_tokens,
            "seed": self._seed,
        }
        return _chunk(
            token,
            generated_text=self._prompt + "".join(self._text),
            details=details if self._with_details else None,
            **_schema_error(event),
        )

    def _tokens(self, event: TokenEvent) -> Iterator[Json]:
        entries = event.logprobs or ()
        for entry in entries:
            yield self._token(entry)
        has_ended = event.finish_reason == FinishReason.STOP and event.stop_string is None
        if has_ended or (event.finish_reason and not entries):
            # Events do not show the token that ends an answer.
            yield {"id": self._eos_token_id, "text": "", "logprob": 0.0, "special": True}

    def _token(self, entry: Json) -> Json:
        # A special token is no part of the text, but a client may want to see it.
        token = {
            "id": entry["id"],
            "text": entry["token"] if entry["special"] else entry["text"],
            "logprob": entry["logprob"],
            "special": entry["special"],
        }
        if self._with_alternatives:
            token["alternative_tokens"] = [
                {"id": other["id"], "text": other["token"], "logprob": other["logprob"]}
                for other in entry["top_logprobs"]
            ]
        return token


def _mean_logprob(events: list[TokenEvent]) -> float:
    logprobs = [entry["logprob"] for event in events for entry in event.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _schema_error(event: TokenEvent) -> Json:
    """Return how the text breaks its schema, if it does."""
    return {} if event.schema_error is None else {"schema_error": event.schema_error}


def _chunk(
    token: Json,
    *,
    generated_text: str | None = None,
    details: Json | None = None,
    **more: str,
) -> bytes:
    return sse({"token": token, "generated_text": generated_text, "details": details, **more})
