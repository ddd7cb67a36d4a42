"""The whole path with the real engine on a tiny random model: nothing is lost in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from tests.live import LiveStack
from tests.tiny_base import TINY_NAME, write_tiny_base

MESSAGES: list[Any] = [{"role": "user", "content": "hello, how are you?"}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def client(live: LiveStack, tiny: Path) -> Iterator[OpenAI]:
    pool = live.with_pool("real")
    web, url = pool.start_web()
    worker = pool.start_worker("real-worker", step_s=None, base=tiny, LORIKEET_SPECULATION="on")
    yield OpenAI(base_url=f"{url}/v1", api_key=live.tenants["acme"].key, max_retries=0)
    assert worker.stop() == 0, worker.log.read_text()
    web.end()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_greedy_answers_are_hugging_faces(client: OpenAI, tiny: Path, stream: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    expected = tokenizer.decode(generated[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    answer = client.chat.completions.create(
        model=TINY_NAME, messages=MESSAGES, temperature=0, max_tokens=24, stream=stream
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.usage.prompt_tokens == prompt["input_ids"].shape[1]
    assert text == expected


def test_a_finished_answer_obeys_its_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "zeta": {"enum": ["on", "off"]},
            "alpha": {"type": "integer", "minimum": 10, "maximum": 99},
        },
        "required": ["zeta", "alpha"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(
        model=TINY_NAME, messages=MESSAGES, response_format=form, seed=1, max_tokens=400
    )
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content or "")
    jsonschema.validate(value, schema)
    assert list(value) == ["zeta", "alpha"]  # in the order of the schema


def test_a_schema_that_nothing_satisfies_is_a_400(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=TINY_NAME, messages=MESSAGES, response_format=form)
    assert caught.value.code == "invalid_response_format"
    assert caught.value.param == "response_format.json_schema.schema"


def test_drafts_show_in_the_usage_and_a_request_may_turn_them_off(client: OpenAI) -> None:
    """In a chat, a completion and a response, with the same answer."""
    answer_of = {"customer_number": {"enum": ["first"]}, "is_delivered": {"type": "boolean"}}
    schema = {"type": "object", "properties": answer_of, "required": [*answer_of]}
    schema |= {"additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    said: Any = {"name": "a", "schema": schema, "type": "json_schema"}
    own: Any = {"model": TINY_NAME, "temperature": 0}
    answers = []
    for off in ({}, {"speculation": False}):
        chat = client.chat.completions.create(
            messages=MESSAGES, response_format=form, max_tokens=90, extra_body=off, **own
        )
        text = client.completions.create(
            prompt="hello", max_tokens=90, extra_body={"response_format": form, **off}, **own
        )
        response = client.responses.create(
            input="hello", text={"format": said}, max_output_tokens=90, extra_body=off, **own
        )
        assert chat.usage is not None and text.usage is not None and response.usage is not None
        for told in (
            chat.usage.completion_tokens_details,
            text.usage.completion_tokens_details,
            response.usage.output_tokens_details,
        ):
            counts = told.model_dump()  # type: ignore[union-attr]
            if off:
                assert not counts.get("accepted_prediction_tokens")
            else:
                assert counts["accepted_by_source"]["forced"] > 20
                assert (
                    counts["accepted_prediction_tokens"] >= counts["accepted_by_source"]["forced"]
                )
        answers.append(
            (chat.choices[0].message.content, text.choices[0].text, response.output_text)
        )
    assert answers[0] == answers[1]


def test_the_same_seed_gives_the_same_answer(client: OpenAI) -> None:
    answers = [
        client.chat.completions.create(model=TINY_NAME, messages=MESSAGES, seed=seed, max_tokens=16)
        .choices[0]
        .message.content
        for seed in (5, 5, 6)
    ]
    assert answers[0] == answers[1] != answers[2]
