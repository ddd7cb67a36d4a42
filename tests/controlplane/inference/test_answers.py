"""OpenAI's bodies and the exact bytes of a stream."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from contract.messages.protocol import CALL_BEGIN, CALL_END, TokenEvent, Usage
from controlplane.inference.answers import ChatAnswer, CompletionAnswer, usage_body

USAGE = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
CALL = f'{CALL_BEGIN}{{"name": "f", "arguments": {{"a": 1}}}}{CALL_END}'
LOGPROB = {"token": "hi", "id": 7, "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}


def make(kind: type[Any], *, with_usage: bool = False, **fields: Any) -> Any:
    return kind(
        answer_id="id-1",
        created=7,
        model="m",
        fingerprint="fp_1",
        with_usage=with_usage,
        service_tier="default" if kind is ChatAnswer else None,
        **fields,
    )


def event(text: str = "", **fields: Any) -> TokenEvent:
    return TokenEvent(request_id="r", lease=1, seq=0, text=text, **fields)


def decoded(chunks: Any) -> list[dict[str, Any]]:
    bodies = []
    for chunk in chunks:
        assert chunk.startswith(b"data: ")
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n") == 2
        bodies.append(json.loads(chunk[6:]))
    return bodies


def test_usage_has_openais_counts_of_drafts_and_ours() -> None:
    drafted = dataclasses.replace(USAGE, accepted_drafts={"forced": 2}, rejected_drafts=1)
    told = usage_body(drafted)["completion_tokens_details"]
    assert (told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]) == (2, 1)
    assert told["accepted_by_source"] == {"forced": 2}
    assert "accepted_by_source" not in usage_body(USAGE)["completion_tokens_details"]
    assert usage_body(TokenEvent.from_dict({**event(usage=drafted).to_dict()}).usage or USAGE) == (
        usage_body(drafted)
    )


def test_the_bytes_of_a_chat_stream() -> None:
    answer = make(ChatAnswer)
    head = (
        b'data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"m",'
        b'"service_tier":"default","system_fingerprint":"fp_1","choices":[{"index":0,"delta":'
    )
    assert list(answer.opening()) == [
        head + b'{"role":"assistant","content":"","refusal":null},'
        b'"logprobs":null,"finish_reason":null}]}\n\n'
    ]
    assert list(answer.chunks(event("gr\u00fc\n\u2028"))) == [
        head
        + '{"content":"gr\u00fc\\n\\u2028"},"logprobs":null,"finish_reason":null}]}\n\n'.encode()
    ]
    assert list(answer.chunks(event(finish_reason="stop", usage=USAGE))) == [
        head + b'{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
    ]


@pytest.mark.parametrize("text", ["hi", CALL], ids=["text", "call"])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_chat_is_what_the_client_knows(text: str, with_usage: bool) -> None:
    """Field by field, whole and in chunks."""

    def answer() -> ChatAnswer:
        made: ChatAnswer = make(ChatAnswer, with_usage=with_usage, has_tools=True)
        return made

    events = [event(text[:4], logprobs=(LOGPROB,)), event(text[4:], finish_reason="stop")]
    events[-1] = dataclasses.replace(events[-1], usage=USAGE)
    whole = answer().whole(events)
    ChatCompletion.model_validate(whole)
    assert set(ChatCompletion.model_fields) - set(whole) == {"metadata", "moderation"}
    writer = answer()
    chunks = [*writer.opening(), *(chunk for each in events for chunk in writer.chunks(each))]
    for body in decoded(chunks):
        ChatCompletionChunk.model_validate(body)
        missing = {"moderation", "obfuscation"} | (set() if with_usage else {"usage"})
        assert set(ChatCompletionChunk.model_fields) - set(body) == missing


def test_usage_comes_last_and_alone_when_asked_for() -> None:
    answer = make(ChatAnswer, with_usage=True)
    chunks = decoded(answer.chunks(event("x", finish_reason="length", usage=USAGE)))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_without_it_no_chunk_speaks_of_usage() -> None:
    chunks = decoded(make(ChatAnswer).chunks(event("x", finish_reason="stop", usage=USAGE)))
    assert all("usage" not in chunk for chunk in chunks)


def test_an_event_without_news_adds_nothing() -> None:
    assert list(make(ChatAnswer).chunks(event())) == []
    assert list(make(CompletionAnswer).chunks(event())) == []


def test_a_whole_chat() -> None:
    body = make(ChatAnswer).whole([event("hi", finish_reason="stop", usage=USAGE)])
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "hi"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 3


def test_chat_logprobs() -> None:
    (choice,) = make(ChatAnswer).whole([event("hi", logprobs=(LOGPROB,))])["choices"]
    assert choice["logprobs"] == {"content": [LOGPROB], "refusal": None}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_completion_logprobs_are_parallel_lists(is_streamed: bool) -> None:
    best = {"token": "ho", "id": 8, "logprob": -1.0, "bytes": []}
    answer = make(CompletionAnswer)
    one = event("hi", logprobs=({**LOGPROB, "top_logprobs": [LOGPROB, best]},))
    bodies = decoded(answer.chunks(one)) if is_streamed else [answer.whole([one])]
    assert bodies[0]["choices"][0]["logprobs"] == {
        "tokens": ["hi"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"hi": -0.5, "ho": -1.0}],
        "text_offset": [0],
    }


def token(token_id: int, content: bytes, logprob: float, **more: Any) -> dict[str, Any]:
    text = content.decode(errors="replace")
    return {"token": text, "id": token_id, "logprob": logprob, "bytes": list(content), **more}


def completion_logprobs(*entries: dict[str, Any]) -> dict[str, Any]:
    (choice,) = make(CompletionAnswer).whole([event("", logprobs=entries)])["choices"]
    found: dict[str, Any] = choice["logprobs"]
    return found


def test_parts_of_characters_are_named_by_their_bytes() -> None:
    """As OpenAI writes them; by their text all would be one replacement character."""
    best = [token(1, b"\xf0\x9f", -0.1), token(2, b" \xe6", -1.0), token(3, b"\x9f'\"\\", -2.0)]
    found = completion_logprobs(token(4, b"\xf0", -3.0, top_logprobs=best))
    names = ["bytes:\\xf0\\x9f", "bytes: \\xe6", "bytes:\\x9f\\'\"\\\\", "bytes:\\xf0"]
    assert found["tokens"] == names[-1:]
    assert found["top_logprobs"] == [dict(zip(names, [-0.1, -1.0, -2.0, -3.0], strict=True))]


@pytest.mark.parametrize(
    "chosen, names",
    [
        (5, {"\u00e9": -0.1, "token_id:6": -1.0}),
        (6, {"token_id:5": -0.1, "\u00e9": -1.0}),  # the likelier one keeps its own value
        (9, {"\u00e9": -0.1, "token_id:6": -1.0, "a": -2.0}),
    ],
)
def test_tokens_of_the_same_text_stay_apart(chosen: int, names: dict[str, float]) -> None:
    best = [token(5, b"\xc3\xa9", -0.1), token(6, b"\xc3\xa9", -1.0)]
    own = {each["id"]: each for each in [*best, token(9, b"a", -2.0)]}[chosen]
    found = completion_logprobs({**own, "top_logprobs": best})
    assert found["top_logprobs"] == [names]
    likeliest = max(names, key=names.__getitem__)
    assert (likeliest == found["tokens"][0]) == (chosen == 5)  # how lm-eval tells a greedy answer


def test_offsets_behind_a_broken_character() -> None:
    """Its bytes are a replacement character in the text, which the next token is behind."""
    parts = [b"a", b"\xf0\x9f", b"b", b"\xc3", b"\xa9", b"c"]
    entries = [token(n, part, -1.0, top_logprobs=[]) for n, part in enumerate(parts)]
    assert completion_logprobs(*entries)["text_offset"] == [0, 1, 2, 3, 3, 4]
    assert b"".join(parts).decode(errors="replace") == "a\ufffdb\u00e9c"


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    answer = make(CompletionAnswer)
    first = decoded(answer.chunks(event("hi", logprobs=(LOGPROB,))))
    second = decoded(answer.chunks(event("hi", logprobs=(LOGPROB,))))
    offsets = [body["choices"][0]["logprobs"]["text_offset"] for body in first + second]
    assert offsets == [[0], [2]]


def test_no_client_sees_the_end_of_a_line_in_a_text() -> None:
    """httpx, for one, takes all that `str.splitlines` does for one."""
    text = "".join(map(chr, range(0x3000)))
    (chunk,) = make(ChatAnswer).chunks(event(text))
    assert len(chunk.decode().splitlines()) == 2
    assert decoded([chunk])[0]["choices"][0]["delta"]["content"] == text


def test_a_thought_stands_beside_the_content() -> None:
    events = [
        event(thought="Hm"),
        event(thought=".", logprobs=None),
        event("So", finish_reason="stop", usage=dataclasses.replace(USAGE, thought_tokens=2)),
    ]
    whole = make(ChatAnswer).whole(events)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "So")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    answer = make(ChatAnswer)
    deltas = [
        body["choices"][0]["delta"] for each in events for body in decoded(answer.chunks(each))
    ]
    assert deltas == [
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "So"},
        {},
    ]
    assert "reasoning_content" not in make(ChatAnswer).whole(events[2:])["choices"][0]["message"]
