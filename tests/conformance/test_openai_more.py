"""The official client's other ways: async streams, pages, the helpers under `beta`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_NAME
from tests.tiny_base import ROOMY_NAME


class Verdict(BaseModel):
    is_paid: bool
    level: int


async def test_async_streams_of_every_kind(served: Served) -> None:
    async with served.async_client() as client:
        completion = await client.completions.create(
            model=FAKE_NAME,
            prompt=["one two", "three"],
            max_tokens=8,
            stream=True,
            logprobs=1,
            stream_options={"include_usage": True},
        )
        texts, offsets, usage = ["", ""], [[], []], None  # type: ignore[var-annotated]
        async for chunk in completion:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.logprobs is not None:
                    offsets[choice.index] += choice.logprobs.text_offset or []
        assert usage is not None
        assert usage.completion_tokens == sum(map(len, offsets)) + 2  # and the ends of both
        for text, at in zip(texts, offsets, strict=True):
            assert at == sorted(at)
            assert at[0] == 0
            assert at[-1] < len(text)
        async with client.responses.stream(model=FAKE_NAME, input="four five") as events:
            kinds = [event.type async for event in events]
            assert (await events.get_final_response()).output_text == "four five"
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"


async def test_who_leaves_an_async_stream_leaves_nothing_behind(served: Served) -> None:
    async with served.async_client() as client:
        for _ in range(5):
            stream = await client.chat.completions.create(
                model=FAKE_NAME, messages=say("some words to leave"), stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        answers = await asyncio.gather(
            *(client.chat.completions.create(model=FAKE_NAME, messages=say("x")) for _ in range(4))
        )
    assert [answer.choices[0].message.content for answer in answers] == ["x"] * 4


async def test_an_async_refusal_is_raised_before_the_stream(served: Served) -> None:
    async with served.async_client() as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="no-such", messages=say("x"), stream=True)


def test_pages_of_files_have_each_file_once(served: Served) -> None:
    client = served.client("globex")
    made = [client.files.create(file=(f"{i}.txt", b"x"), purpose="user_data").id for i in range(7)]
    for order in ("asc", "desc"):
        listed = [
            file.id
            for file in client.files.list(limit=3, order=order, purpose="user_data")  # type: ignore[arg-type]
            if file.id in made
        ]
        assert listed == (made if order == "asc" else made[::-1])
    first = client.files.list(limit=3, purpose="user_data")
    assert first.has_more
    assert first.next_page_info() is not None
    for file_id in made:
        assert client.files.delete(file_id).deleted


async def test_async_pages(served: Served) -> None:
    async with served.async_client("globex") as client:
        made = [
            (await client.files.create(file=(f"{i}.txt", b"x"), purpose="user_data")).id
            for i in range(3)
        ]
        listed = [file.id async for file in client.files.list(limit=1, order="asc")]
        assert [file_id for file_id in listed if file_id in made] == made
        models = [model.id async for model in client.models.list()]
        assert len(models) == len(set(models))
        assert "globex-adapter" in models
        assert not any("acme" in model for model in models)
        for file_id in made:
            await client.files.delete(file_id)


def test_the_helpers_under_beta(served: Served) -> None:
    beta: Any = served.client().beta.chat.completions
    answer = beta.parse(
        model=ROOMY_NAME, messages=say("paid?"), response_format=Verdict, max_tokens=400, seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with beta.stream(
        model=ROOMY_NAME, messages=say("paid?"), response_format=Verdict, max_tokens=400, seed=4
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_parse_that_was_cut_says_so(served: Served) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        served.client().chat.completions.parse(
            model=ROOMY_NAME, messages=say("paid?"), response_format=Verdict, max_tokens=2
        )
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [2**40]},
        {"prompt": [2**31 - 1]},
        {"prompt": [[1], [10**6]]},
        {"logit_bias": {"999999999": 1}},
    ],
    ids=str,
)
def test_tokens_that_there_are_not_are_the_clients_fault(
    served: Served, fields: dict[str, Any]
) -> None:
    for model in (FAKE_NAME, ROOMY_NAME):
        body: dict[str, Any] = {"model": model, "prompt": "x", "max_tokens": 2, **fields}
        try:
            served.client().completions.create(**body)
        except openai.BadRequestError as error:
            assert (error.param or "").startswith(next(iter(fields)))


def test_odd_arguments_of_earlier_calls_are_no_defect(served: Served) -> None:
    for arguments in ("[" * 500 + "]" * 500, '{"a": "\\ud800"}', "NaN", "1e400", ""):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = served.client().chat.completions.create(
            model=ROOMY_NAME,
            messages=[
                *say("x"),
                {"role": "assistant", "tool_calls": [call]},  # type: ignore[list-item]
                {"role": "tool", "tool_call_id": "c", "content": "y"},
            ],
            max_tokens=1,
        )
        assert answer.choices[0].finish_reason is not None


def test_a_schema_that_is_not_strict_is_told_of_in_headers(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a\r\nb": {"type": "array", "items": {"type": "object"}, "uniqueItems": True}
        },
    }
    raw = served.client().chat.completions.with_raw_response.create(
        model=ROOMY_NAME,
        messages=say("x"),
        max_tokens=4,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    assert raw.headers["lorikeet-schema-checked"] == "/properties/a\\r\\nb/uniqueItems"


def test_events_end_only_at_their_ends(served: Served) -> None:
    """Whatever a client takes for the end of a line: httpx takes what `splitlines` does."""
    text = "a\u2028b\u2029c\x85d"
    for path, body in (
        ("/v1/chat/completions", {"messages": say(text)}),
        ("/v1/completions", {"prompt": text, "max_tokens": 40}),
        ("/v1/responses", {"input": text}),
    ):
        headers = {"Authorization": f"Bearer {served.key()}"}
        sent = {"model": FAKE_NAME, "stream": True, **body}
        with httpx.stream("POST", served.url + path, json=sent, headers=headers) as response:
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith(("data: ", "event: ", ":")) for line in lines), path


def test_headers_say_what_answered_and_where_it_was(served: Served) -> None:
    chat = served.client().chat.completions.with_raw_response
    for stream in (False, True):
        raw = chat.create(
            model=served.live.tenants["acme"].adapter, messages=say("x"), stream=stream
        )
        assert raw.headers["x-lorikeet-version"] == f"{served.live.tenants['acme'].adapter}@1"
        assert len(raw.headers["x-lorikeet-digest"]) == 64
        assert int(raw.headers["x-lorikeet-queue-ms"]) >= 0
        assert raw.headers["x-lorikeet-tier"] in ("gpu", "host", "disk", "store")
        raw.parse() if not stream else list(raw.parse())
    raw = served.client().completions.with_raw_response.create(model=FAKE_NAME, prompt="x")
    assert "x-lorikeet-version" not in raw.headers and "x-lorikeet-tier" not in raw.headers
    assert int(raw.headers["x-lorikeet-queue-ms"]) >= 0
    raw_response = served.client().responses.with_raw_response.create(
        model=served.live.tenants["acme"].adapter, input="x"
    )
    assert raw_response.headers["x-lorikeet-version"] == f"{served.live.tenants['acme'].adapter}@1"
