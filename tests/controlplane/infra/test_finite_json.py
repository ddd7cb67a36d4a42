"""No body brings a number into the platform that JSON does not have."""

from __future__ import annotations

import json
import math
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidRequest
from controlplane.files.batches.lines import parse_line, parse_request
from controlplane.gateway.files.bodies import UploadBody
from controlplane.gateway.lorax.schemas import GenerateBody
from controlplane.inference.bodies import Body
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.infra import finite_json
from tests.controlplane.conftest import Party, as_key, assert_error

#: Written where a body below has HERE.
NOT_FINITE = ["NaN", "Infinity", "-Infinity", "1e999", "-1.5E+309", "1" * 400 + ".5"]
MESSAGES = [{"role": "user", "content": "hi"}]
HERE = "HERE"
SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "minimum": HERE}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
MINIMUM = "properties.a.minimum"
BODIES: list[tuple[type[Body], dict[str, Any], str]] = [
    (
        ChatBody,
        {"model": "m", "messages": MESSAGES, "response_format": FORMAT},
        f"response_format.json_schema.schema.{MINIMUM}",
    ),
    (
        ChatBody,
        {"model": "m", "messages": MESSAGES, "tools": TOOLS},
        f"tools.0.function.parameters.{MINIMUM}",
    ),
    (
        ChatBody,
        {"model": "m", "messages": [{**MESSAGES[0], "annotations": [HERE]}]},
        "messages.0.annotations.0",
    ),
    (ChatBody, {"model": "m", "messages": MESSAGES, "temperature": HERE}, "temperature"),
    (ChatBody, {"model": "m", "messages": MESSAGES, "typing_error": HERE}, "typing_error"),
    (CompletionBody, {"model": "m", "prompt": "x", "suffix": HERE}, "suffix"),
    (
        ResponsesBody,
        {
            "model": "m",
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        },
        f"text.format.schema.{MINIMUM}",
    ),
    (
        ResponsesBody,
        {
            "model": "m",
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
        f"tools.0.parameters.{MINIMUM}",
    ),
    (
        GenerateBody,
        {
            "inputs": "x",
            "parameters": {"response_format": {"type": "json_object", "schema": SCHEMA}},
        },
        f"parameters.response_format.schema.{MINIMUM}",
    ),
    (UploadBody, {"filename": "x", "bytes": HERE}, "bytes"),
]


def written(body: dict[str, Any], number: str) -> bytes:
    return json.dumps(body).replace(f'"{HERE}"', number).encode()


@pytest.mark.parametrize("number", NOT_FINITE, ids=lambda number: str(number[:10]))
@pytest.mark.parametrize(("kind", "body", "param"), BODIES, ids=[case[2] for case in BODIES])
def test_a_body_with_one_is_refused_by_its_place(
    kind: type[Body], body: dict[str, Any], param: str, number: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(kind, written(body, number))
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert "no NaN and no infinite numbers" in caught.value.message


def test_such_words_in_a_text_are_words() -> None:
    said = "NaN, Infinity, 1e999, 0e000 and " + "7" * 500
    body = {"model": "m", "messages": [{"role": "user", "content": said}], "seed": int("9" * 18)}
    assert parse_body(ChatBody, json.dumps(body).encode()).messages[0].content == said


def test_the_largest_numbers_pass() -> None:
    schema = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e308}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "m", "messages": MESSAGES, "response_format": form}
    given = parse_body(ChatBody, json.dumps(body).encode()).response_format
    assert given is not None
    assert given.json_schema is not None
    assert given.json_schema.schema_ == schema


@given(
    st.recursive(
        st.floats() | st.integers() | st.text("NaInfity1e+9."),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_none_is_overlooked(value: Any) -> None:
    """Whatever is around it, and wherever it is."""

    def has_one(value: Any) -> bool:
        if isinstance(value, float):
            return not math.isfinite(value)
        inner = value.values() if isinstance(value, dict) else value
        return isinstance(value, dict | list) and any(has_one(each) for each in inner)

    try:
        finite_json.check_body(json.dumps(value).encode())
    except InvalidRequest:
        assert has_one(value)
    else:
        assert not has_one(value)


@given(
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,420})(\.[0-9]{1,420})?([eE][+-]?[0-9]{1,4})?\Z"),
    st.sampled_from(["[{}]", '{{"a":{}}}', "[1,{}, 2]"]),
)
def test_a_number_passes_if_and_only_if_a_double_holds_it(number: str, around: str) -> None:
    is_finite = math.isfinite(float(number))
    is_whole = number.lstrip("-").isdigit()  # of any length: JSON's readers here keep them whole
    try:
        finite_json.check_body(around.format(number).encode())
    except InvalidRequest:
        assert not is_finite
    else:
        assert is_finite or is_whole


@pytest.mark.parametrize("number", NOT_FINITE)
def test_a_line_of_a_batch_is_refused_as_the_live_api_does(number: str) -> None:
    body = {"model": "m", "messages": MESSAGES, "response_format": FORMAT}
    fields = {"custom_id": "a", "method": "POST", "url": ChatBody.endpoint, "body": body}
    line = parse_line(1, written(fields, number), ChatBody.endpoint)
    with pytest.raises(InvalidRequest) as caught:
        parse_request(line, ChatBody.endpoint, uuid.uuid4())
    assert caught.value.param == f"response_format.json_schema.schema.{MINIMUM}"


@pytest.mark.parametrize("number", NOT_FINITE[:4])
def test_the_management_api_refuses_them_too(acme: Party, number: str) -> None:
    raw = written({"schema": SCHEMA}, number)
    answer = as_key(acme).post("/api/v1/schemas/lint", raw, content_type="application/json")
    assert_error(answer, 400, f"schema.{MINIMUM}")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_calls_arguments_with_one_stay_text(number: str) -> None:
    """A template would get what its author never thought of, and the job would be no JSON."""
    arguments = f'{{"a": {number}}}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    body = parse_body(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
    (rendered,) = body.rendered_messages()[1]["tool_calls"]
    assert rendered["function"]["arguments"] == arguments
