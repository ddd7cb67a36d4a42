"""A tenant's answers through the official client: whole, streamed, to a schema, nobody else's."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.system import System, until

MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 1000, "maximum": 20_000_000},
        "tags": {"type": "array", "items": {"enum": ["big", "old", "rich"]}, "maxItems": 2},
    },
    "required": ["city", "population", "tags"],
    "additionalProperties": False,
}


def test_models_are_the_tenants_own_and_the_base(system: System) -> None:
    for slug, tenant in system.tenants.items():
        listed = {model.id for model in system.client(slug).models.list()}
        others = {other.adapter for other in system.tenants.values()} - {tenant.adapter}
        assert {tenant.adapter, system.base_model} <= listed
        assert not others & listed


@pytest.mark.long  # all layers know it
def test_base_model_knows_the_capital_of_france(system: System) -> None:
    answer = system.client().chat.completions.create(
        model=system.base_model, messages=MESSAGES, temperature=0, max_tokens=20
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in {"stop", "length"}


def test_streamed_and_whole_answers_are_the_same(system: System) -> None:
    client = system.client()
    options = {
        "model": system.tenants["acme"].adapter,
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_each_tenants_adapter_answers_in_its_own_way(system: System) -> None:
    def ask(pair: tuple[str, str]) -> str:
        tenant, model = pair
        answer = system.client(tenant).completions.create(
            model=model, prompt="Once upon a time", temperature=0, max_tokens=16
        )
        return answer.choices[0].text

    asked = [(slug, tenant.adapter) for slug, tenant in system.tenants.items()]
    asked.append(("acme", system.base_model))
    with ThreadPoolExecutor() as pool:  # in the same moment, so in one batch
        together = list(pool.map(ask, asked))
    assert len(set(together)) == 3
    assert [ask(pair) for pair in asked] == together


def test_answer_obeys_its_schema(system: System) -> None:
    answer = system.client().chat.completions.create(
        model=system.tenants["acme"].adapter,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        temperature=0.8,
        seed=7,
        max_tokens=150,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop", answer.choices[0].message.content
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_somebody_elses_adapter_looks_like_none(system: System) -> None:
    foreign = system.tenants["globex"].adapter
    unknown = "x" * len(foreign)
    headers = {"Authorization": f"Bearer {system.tenants['acme'].api_key}"}

    def post(model: str) -> httpx.Response:
        body = {"model": model, "messages": MESSAGES}
        return httpx.post(f"{system.base_url}/v1/chat/completions", json=body, headers=headers)

    theirs, none = post(foreign), post(unknown)
    assert theirs.status_code == none.status_code == 404
    assert theirs.content.replace(foreign.encode(), unknown.encode()) == none.content
    assert theirs.json()["error"]["code"] == "model_not_found"
    assert set(theirs.headers) == set(none.headers)
    with pytest.raises(openai.NotFoundError):
        system.client("acme").models.retrieve(foreign)


@pytest.mark.alone
def test_first_token_comes_within_two_seconds_when_idle(system: System) -> None:
    client = system.client()
    options = {
        "model": system.tenants["acme"].adapter,
        "messages": MESSAGES,
        "max_tokens": 8,
        "stream": True,
    }
    list(client.chat.completions.create(**options))  # the adapter's first use loads it
    started = time.monotonic()
    for chunk in client.chat.completions.create(**options):
        if chunk.choices and chunk.choices[0].delta.content:
            break
    assert time.monotonic() - started < 2.0


def test_usage_is_recorded_as_the_answer_says(system: System) -> None:
    response = system.client().chat.completions.with_raw_response.create(
        model=system.tenants["acme"].adapter, messages=MESSAGES, max_tokens=5
    )
    usage = response.parse().usage
    record = system.usage_soon(response.headers["x-request-id"])
    assert usage is not None
    assert record["prompt_tokens"] == usage.prompt_tokens
    assert record["completion_tokens"] == usage.completion_tokens == 5
    assert record["model"] == system.tenants["acme"].adapter


def test_leaving_ends_the_generation(system: System) -> None:
    stream = system.client().chat.completions.create(
        model=system.tenants["acme"].adapter,
        messages=MESSAGES,
        max_tokens=2000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    request_id = stream.response.headers["x-request-id"]
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    stream.close()
    record = system.usage_soon(request_id)
    assert record["finish_reason"] == "cancelled"
    assert 0 < record["completion_tokens"] < 1000
    until(lambda: system.running_requests() == 0, "an idle worker")
