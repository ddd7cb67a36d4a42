"""Chat and completions through the official client, as an application uses it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
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


def test_parse_gives_the_model_of_a_schema(served: Served) -> None:
    answer = served.client().chat.completions.parse(
        model=ROOMY_NAME, messages=say("paid?"), response_format=Verdict, max_tokens=400, seed=4
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_the_stream_helper_gives_events_and_the_whole(served: Served) -> None:
    with served.client().chat.completions.stream(
        model=FAKE_NAME, messages=say("one two three"), stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "one two three"
    assert final.usage is not None


def test_choices_draw_each_for_itself(served: Served) -> None:
    def texts(n: int, seed: int) -> list[str]:
        answer = served.client().completions.create(
            model=ROOMY_NAME, prompt="hello", n=n, best_of=n, seed=seed, max_tokens=12
        )
        assert answer.usage is not None
        return [choice.text for choice in answer.choices]

    together = texts(3, 7)
    assert len(set(together)) == 3
    assert together == [texts(1, 7 + index)[0] for index in range(3)]


def test_logprobs_are_of_the_tokens_of_the_text(served: Served) -> None:
    client = served.client()
    answer = client.completions.create(
        model=ROOMY_NAME, prompt="hello", logprobs=3, max_tokens=8, temperature=0
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert told.text_offset[0] == 0
    assert told.text_offset == sorted(told.text_offset)
    # At temperature 0 each is the likeliest. Tokens that are parts of characters read alike.
    for logprob, best in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == max(best.values())
    chat = client.chat.completions.create(
        model=ROOMY_NAME, messages=say("x"), logprobs=True, top_logprobs=2, n=2, max_tokens=4
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content or [])


def test_a_bias_decides(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=ROOMY_NAME,
        messages=say("x"),
        logit_bias={"40": 100},
        max_completion_tokens=5,
        logprobs=True,
    )
    assert answer.choices[0].logprobs is not None
    tokens = [entry.token for entry in answer.choices[0].logprobs.content or []]
    assert len(tokens) == 5
    assert len(set(tokens)) == 1
    assert answer.choices[0].finish_reason == "length"


def test_what_makes_no_difference_is_taken(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=FAKE_NAME,
        messages=[*say("be brief", "developer"), *say("hi")],
        user="u-1",
        safety_identifier="s-1",
        prompt_cache_key="k",
        metadata={"ticket": "7"},
        store=False,
        service_tier="auto",
        stop=["a", "b", "c", "d"],
    )
    assert answer.choices[0].message.content == "hi"
    assert answer.service_tier == "default"


@pytest.mark.parametrize(("asked", "served_as"), [("flex", "flex"), ("priority", "default")])
def test_the_tier_that_served_it_is_told(served: Served, asked: Any, served_as: str) -> None:
    create = served.client().chat.completions.create
    answer = create(model=FAKE_NAME, messages=say("hi"), service_tier=asked)
    chunks = list(create(model=FAKE_NAME, messages=say("hi"), service_tier=asked, stream=True))
    assert {answer.service_tier, *(chunk.service_tier for chunk in chunks)} == {served_as}


async def test_async_streams_side_by_side(served: Served) -> None:
    async with served.async_client() as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model=FAKE_NAME, messages=say(f"number {number}"), stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(number) for number in range(12)))
    assert texts == [f"number {number}" for number in range(12)]


def test_raw_headers(served: Served) -> None:
    raw = served.client(
        organization="org-somebody", project="proj_x"
    ).chat.completions.with_raw_response.create(model=FAKE_NAME, messages=say("x"))
    assert raw.headers["openai-version"] == "2020-10-01"
    assert raw.headers["openai-organization"] == "acme"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert raw.parse()._request_id == raw.headers["x-request-id"]


@pytest.mark.parametrize(
    "fields,status,param,code",
    [
        ({"model": "no-such"}, 404, "model", "model_not_found"),
        ({"temperature": 3}, 400, "temperature", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, 400, "temprature", "unknown_parameter"),
        ({"n": 17}, 400, "n", "invalid_value"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": say("x" * 600)}, 400, "messages", "context_length_exceeded"),
        ({"model": "acme-misfit"}, 409, "model", "adapter_incompatible"),
        ({"model": "unserved"}, 503, None, "overloaded"),
        ({"extra_headers": {"Authorization": "Bearer no"}}, 401, None, "invalid_api_key"),
    ],
    ids=str,
)
def test_every_error_is_the_clients_own_class(
    served: Served, fields: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    body: dict[str, Any] = {"model": FAKE_NAME, "messages": say("x"), **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        served.client().chat.completions.create(**body)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)
    assert type(error) is {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        409: openai.ConflictError,
        503: openai.InternalServerError,
    }.get(status)
    retries = error.response.headers.get("x-should-retry")
    assert retries == ("false" if status in (400, 409) else None)


def test_the_client_comes_back_when_it_was_told_to(served: Served) -> None:
    client = served.client(max_retries=1)
    started = time.monotonic()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="unserved", messages=say("x"))
    wait = int(caught.value.response.headers["retry-after"])
    assert wait >= 1
    assert time.monotonic() - started >= wait
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "1"


def test_a_refusal_comes_at_once(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    """Median to the first byte of a refused request; the bound leaves room for a busy machine."""
    times = []
    with httpx.Client(base_url=served.url) as client:
        for number in range(60):
            body = {"model": FAKE_NAME, "messages": say("x"), "temperature": 3 + number}
            started = time.perf_counter()
            with client.stream(
                "POST",
                "/v1/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {served.key()}"},
            ) as response:
                times.append(time.perf_counter() - started)
                assert response.status_code == 400
                response.read()
    record_property("refused_median_ms", round(statistics.median(times) * 1000, 2))
    assert statistics.median(times) < 0.1


def test_the_chunks_of_a_stream(served: Served) -> None:
    with httpx.stream(
        "POST",
        f"{served.base_url}/chat/completions",
        json={
            "model": FAKE_NAME,
            "messages": say("hi you"),
            "stream": True,
            "n": 2,
            "stream_options": {"include_usage": True},
        },
        headers={"Authorization": f"Bearer {served.key()}"},
    ) as response:
        events = response.read().split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    opening = [chunk["choices"][0] for chunk in chunks[:2]]
    assert [(each["index"], each["delta"]["role"]) for each in opening] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
