"""Responses and their events, held against the official client's own models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from contract.messages.protocol import CALL_BEGIN, CALL_END, TokenEvent, Usage
from controlplane.errors import Unavailable
from controlplane.inference.responses.answers import ResponsesAnswer
from controlplane.inference.responses.schemas import ResponsesBody

#: Fields of the client's Response for what there is none of here.
ABSENT = {
    "access_programs",
    "image",
    "input_transformations",
    "moderation",
    "prompt_cache_diagnostics",
    "prompt_cache_options",
    "tool_usage",
}
#: What OpenAI's responses have beside the fields of the client's model.
MORE = {"store", "presence_penalty", "frequency_penalty"}
CREATED, DONE = 100, 160
TOOL = {
    "type": "function",
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": {"a": {"const": None}}},
    "strict": False,
}
FULL: dict[str, Any] = {
    "model": "m",
    "input": "x",
    "instructions": "Be brief.",
    "max_output_tokens": 50,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": None}}},
    "tools": [TOOL],
    "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": False,
    "store": False,
    "metadata": {"ticket": "7"},
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "frequency_penalty": 0.25,
    "presence_penalty": -0.25,
}
CALL = f'{CALL_BEGIN}{{"name": "f", "arguments": {{"a": null}}}}{CALL_END}'
LOGPROB = {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}


def answer_of(*, has_tools: bool = False, tier: str = "default", **fields: Any) -> ResponsesAnswer:
    body = ResponsesBody.model_validate({"model": "m", "input": "x", **fields})
    return ResponsesAnswer(
        body,
        response_id="resp_1",
        created=CREATED,
        model="m",
        has_tools=has_tools,
        service_tier=tier,
        clock=lambda: DONE + 0.9,
    )


def said(text: str, *, reason: str = "stop", **fields: Any) -> list[TokenEvent]:
    """The text in two events, and its end."""
    first = TokenEvent(request_id="r", lease=1, seq=0, text=text[:5], logprobs=(LOGPROB,))
    last = dataclasses.replace(
        first, text=text[5:], finish_reason=reason, usage=Usage(completion_tokens=3), **fields
    )
    return [first, last]


def events_of(written: Iterable[bytes]) -> list[dict[str, Any]]:
    blocks = b"".join(written).decode().strip().split("\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def streamed(answer: ResponsesAnswer, events: list[TokenEvent]) -> list[dict[str, Any]]:
    opening = list(answer.opening())
    return events_of([*opening, *(chunk for event in events for chunk in answer.chunks(event))])


@pytest.mark.parametrize("text", ["hello there", CALL], ids=["text", "call"])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("fields", [{}, FULL], ids=["little", "all"])
def test_whole_and_streamed_are_what_the_client_knows(
    text: str, reason: str, fields: dict[str, Any]
) -> None:
    whole = answer_of(has_tools=True, **fields).whole(said(text, reason=reason))
    Response.model_validate(whole)
    missing = {field for field in Response.model_fields if field not in whole}
    assert missing == ABSENT
    assert set(whole) - set(Response.model_fields) == MORE
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = streamed(answer_of(has_tools=True, **fields), said(text, reason=reason))
    for event in events:
        adapter.validate_python(event)
    for event in events:
        if "response" in event:
            assert set(event["response"]) == set(whole)


def test_tokens_whose_text_is_still_to_come_are_told_of_with_it() -> None:
    """Part of a character, what may become a stop string, and a special token at the end."""
    tokens = [{**LOGPROB, "token": token} for token in "abcd"]
    blank = dataclasses.replace(said("")[0], text="")
    events = [
        dataclasses.replace(blank, logprobs=(tokens[0],)),
        dataclasses.replace(blank, text="é", logprobs=(tokens[1],)),
        dataclasses.replace(blank, logprobs=(tokens[2],)),
        dataclasses.replace(said("")[1], logprobs=(tokens[3],)),
    ]
    shown = streamed(answer_of(include=["message.output_text.logprobs"]), events)
    (delta,) = [event for event in shown if event["type"] == "response.output_text.delta"]
    assert delta["logprobs"] == tokens[:2]
    (done,) = [event for event in shown if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == tokens
    (item,) = shown[-1]["response"]["output"]
    assert item["content"][0]["logprobs"] == tokens


def test_the_request_is_told_back() -> None:
    whole = answer_of(tier="flex", **FULL).whole(said("hi"))
    same = set(FULL) & set(whole) - {"text"}
    assert len(same) == len(FULL) - 2  # without the input, and text, which follows
    assert {name: whole[name] for name in same} == {name: FULL[name] for name in same}
    assert whole["text"]["format"] == FULL["text"]["format"]


@pytest.mark.parametrize(("reason", "at"), [("stop", DONE), ("length", None)])
def test_completed_at_is_when_it_was_completed(reason: str, at: int | None) -> None:
    whole = answer_of().whole(said("hello", reason=reason))
    assert (whole["created_at"], whole["completed_at"]) == (CREATED, at)
    events = streamed(answer_of(), said("hello", reason=reason))
    times = [event["response"]["completed_at"] for event in events if "response" in event]
    assert times == [None, None, at]


def test_a_response_that_failed_was_not_completed() -> None:
    answer = answer_of()
    written = [*answer.opening(), answer.failure(Unavailable("lost"))]
    failed = events_of(written)[2]
    assert failed["type"] == "response.failed"
    assert failed["response"]["completed_at"] is None


def test_an_answer_that_breaks_its_schema_says_so_in_the_response() -> None:
    told = {"schema_error": "at /: [0, 0] has non-unique elements"}
    whole = answer_of().whole(said("[0, 0]", **told))
    assert (whole["status"], whole["schema_error"]) == ("completed", told["schema_error"])
    *others, last = streamed(answer_of(), said("[0, 0]", **told))
    assert last["response"]["schema_error"] == told["schema_error"]
    assert not any("schema_error" in json.dumps(event) for event in others)
    assert Response.model_validate(whole).model_extra == {**told, **extra(whole)}


def extra(whole: dict[str, Any]) -> dict[str, Any]:
    return {name: whole[name] for name in MORE}


def test_a_thought_is_an_item_before_the_message() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=3, thought_tokens=2)
    events = [
        TokenEvent(request_id="r", lease=1, seq=0, thought="Hm"),
        TokenEvent(request_id="r", lease=1, seq=1, thought=".", text="So"),
        TokenEvent(request_id="r", lease=1, seq=2, finish_reason="stop", usage=usage),
    ]
    answer = answer_of(reasoning={"effort": "low"})
    told = [json.loads(chunk.split(b"data: ")[1]) for e in events for chunk in answer.chunks(e)]
    for data in told:
        TypeAdapter(ResponseStreamEvent).validate_python(data, strict=False)
    kinds = [data["type"].removeprefix("response.") for data in told]
    assert kinds[:8] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_item.added"),
    ]
    response = Response.model_validate(told[-1]["response"])
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")  # type: ignore[union-attr, index]
    assert message.type == "message" and response.output_text == "So"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.reasoning is not None and response.reasoning.effort == "low"
