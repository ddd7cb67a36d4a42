"""Structured outputs through the live server and a real engine: every finished answer obeys its
schema, with and without an adapter, streamed and not, at temperatures 0 and 1."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.engine.conftest import save_adapter
from tests.live import LiveStack
from tests.schema_cases import CHECKED, ENFORCED
from tests.tiny_base import TINY_NAME, write_tiny_base

ADAPTER = "acme-tiny"
VALIDATOR = jsonschema.Draft202012Validator
LINEARS = ["q_proj", "v_proj", "down_proj"]
MAX_TOKENS = 220
#: An automaton of millions of states each, which no bound on a single keyword sees coming.
BOMBS = [
    {"type": "integer", "allOf": [{"multipleOf": 1999}, {"multipleOf": other}]}
    for other in (1997, 1993)
]


@pytest.fixture(scope="module")
def url(live: LiveStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tiny")
    base = write_tiny_base(folder / "base")
    adapter = save_adapter(base, folder / "adapter", 1, r=4, lora_alpha=8, target_modules=LINEARS)
    tenant = live.tenants["acme"]
    live.run("-m", "tests.live_adapter", tenant.id, ADAPTER, str(adapter))
    pool = live.with_pool("schemas")
    web, address = pool.start_web()
    worker = pool.start_worker("schemas-worker", step_s=None, base=base)
    yield address
    assert worker.stop() == 0, worker.log.read_text()
    web.end()


@pytest.fixture(scope="module")
def client(live: LiveStack, url: str) -> OpenAI:
    return OpenAI(
        base_url=f"{url}/v1", api_key=live.tenants["acme"].key, max_retries=0, timeout=300
    )


def ask(client: OpenAI, schema: dict[str, Any], **more: Any) -> tuple[str | None, str]:
    """Why the answer ended, and its text."""
    form: Any = {"name": "answer", "schema": schema, "strict": more.pop("strict", True)}
    given: dict[str, Any] = {"model": TINY_NAME, "max_tokens": MAX_TOKENS, **more}
    answer: Any = client.chat.completions.create(
        messages=[{"role": "user", "content": "Answer in JSON."}],
        response_format={"type": "json_schema", "json_schema": form},
        **given,
    )
    if not given.get("stream"):
        return answer.choices[0].finish_reason, answer.choices[0].message.content
    chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
    return chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks)


def prove(client: OpenAI, ways: list[tuple[str, bool, int]]) -> tuple[int, int]:
    """Ask for every schema in every way; how many answers finished, of how many."""

    def one(case: tuple[str, tuple[str, bool, int]]) -> bool:
        name, (model, stream, temperature) = case
        schema = ENFORCED[name].schema
        reason, text = ask(
            client, schema, model=model, stream=stream, temperature=temperature, seed=len(name)
        )
        assert reason in ("stop", "length"), (case, reason)
        if reason == "length":
            return False
        check = VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER)
        assert check.is_valid(json.loads(text)), (case, text)
        return True

    cases = list(itertools.product(ENFORCED, ways))
    with ThreadPoolExecutor(12) as threads:
        finished = list(threads.map(one, cases))
    return sum(finished), len(finished)


MODELS = (TINY_NAME, ADAPTER)


def test_every_finished_answer_validates(client: OpenAI) -> None:
    """Every schema once, the ways in turn; all of them are below."""
    finished, asked = prove(client, [(ADAPTER, True, 1)])
    assert asked >= 60
    assert finished > asked // 2


@pytest.mark.long
def test_every_finished_answer_validates_in_every_way(client: OpenAI) -> None:
    finished, asked = prove(client, list(itertools.product(MODELS, (False, True), (0, 1))))
    assert asked >= 60 * 8
    assert finished > asked // 3


@pytest.mark.parametrize("name", CHECKED)
def test_strict_refuses_what_is_only_checked(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, CHECKED[name].schema)
    assert caught.value.param == "response_format.json_schema.schema"
    assert f"/{name}" in caught.value.message


def test_patterns_are_read_as_ecma_in_every_field(client: OpenAI) -> None:
    """Python's `re` has no \\p and no (?<y>…), and reads \\Z and {,3} in another way."""
    pattern = r"^(?<y>\d{4})-\p{Lu}a{,3}\Z\-$"
    expected = re.compile("[0-9]{4}-.a\\{,3\\}Z-")
    schema = {
        "type": "object", "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    reason, text = ask(client, schema, temperature=1, seed=1)
    assert reason == "stop" and expected.fullmatch(value := json.loads(text)["a"])
    assert value[5].isupper()
    function = {"name": "f", "strict": True, "parameters": schema}
    given: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}], "tool_choice": "required",
    }  # fmt: skip
    say: Any = [{"role": "user", "content": "x"}]
    called = client.chat.completions.create(
        model=TINY_NAME, messages=say, max_tokens=MAX_TOKENS, parallel_tool_calls=False, **given
    )
    calls: Any = called.choices[0].message.tool_calls
    assert expected.fullmatch(json.loads(calls[0].function.arguments)["a"])
    for form in ({"response_format": {"type": "regex", "pattern": pattern}}, {"regex": pattern}):
        answer = client.chat.completions.create(
            model=TINY_NAME, messages=say, max_tokens=50, extra_body=form
        )
        assert expected.fullmatch(answer.choices[0].message.content or "")


@pytest.mark.parametrize("pattern", ["(?P<y>a)", "a++", r"\1", "(?<y>a)(?<y>b)"])
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_no_pattern_of_ecma_is_refused_by_path(
    client: OpenAI, pattern: str, strict: bool
) -> None:
    for schema, path in (
        ({"properties": {"a": {"type": "string", "pattern": pattern}}}, "/properties/a/pattern"),
        ({"patternProperties": {pattern: {}}}, "/patternProperties"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, {"type": "object", **schema}, strict=strict)
        assert "not a regular expression of ECMA-262" in caught.value.message
        assert path in caught.value.message


def test_a_strict_answer_never_ends_in_a_dead_end(client: OpenAI) -> None:
    """A comma behind the last name would leave nothing to write, by the seed."""
    schema = {
        "type": "object", "properties": {"score": {"type": "integer"}}, "required": ["score"],
        "additionalProperties": False, "patternProperties": {"^score$": {"minimum": 0}},
    }  # fmt: skip
    for seed in range(8):
        reason, text = ask(client, schema, temperature=2, seed=seed, max_tokens=60)
        assert reason in ("stop", "length")
        assert reason == "length" or json.loads(text)["score"] >= 0


def test_an_answer_that_breaks_what_is_only_checked_says_so(live: LiveStack, url: str) -> None:
    """Two zeros are sure to come: the only answers are [0, 0]."""
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 0, "multipleOf": 1},
        "minItems": 2,
        "maxItems": 2,
        "uniqueItems": True,
    }
    body = {
        "model": TINY_NAME,
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": False},
        },
        "max_tokens": 100,
    }
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {live.tenants['acme'].key}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["lorikeet-schema-checked"] == "/uniqueItems"
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "non-unique" in choice["schema_error"]


def test_a_bomb_does_not_slow_others(client: OpenAI) -> None:
    """While a schema is compiled that costs all the time it may, streams go on as before."""
    calm = max(gaps(client))
    outcomes: list[str] = []

    def throw() -> None:
        for bomb in BOMBS:
            try:
                reason, _ = ask(client, bomb, max_tokens=4)
                outcomes.append(str(reason))
            except openai.BadRequestError as error:
                outcomes.append(str(error.code))

    thrower = threading.Thread(target=throw)
    thrower.start()
    beside = max(gaps(client))
    thrower.join()
    assert outcomes == ["invalid_response_format"] * len(BOMBS)
    assert beside < max(10 * calm, 1.0)  # a compilation in the step loop would be 2 s


def gaps(client: OpenAI) -> list[float]:
    """Seconds between the chunks of a long stream."""
    stream = client.chat.completions.create(
        model=TINY_NAME,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=300,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    times = [time.monotonic() for _ in stream]
    return [after - before for before, after in itertools.pairwise(times)]
