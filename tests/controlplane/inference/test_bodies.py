"""Every way a body can be wrong is a 400 that names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from contract.training.row_messages import read_row
from controlplane.errors import InvalidRequest
from controlplane.gateway.lorax.schemas import GenerateBody
from controlplane.inference.bodies import Body
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.schemas import ChatBody, CompletionBody

MESSAGES = [{"role": "user", "content": "hi"}]
OBJECT = {"type": "object"}


def chat(**fields: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"model": "m", "prompt": "p", **fields}).encode())


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, **fields},
    }


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": None}]}, "messages.1.content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_1"}]},
            "messages.0.tool_call_id",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages.0.tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]},
            "messages.0.tool_calls.0",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{**MESSAGES[0], "tool_calls": [{"id": "x"}]}]},
            "messages.0.tool_calls.0.type",
        ),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"adapters": []}, "adapters"),
        ({"adapters": [{"name": "a"}] * 9}, "adapters"),
        ({"adapters": [{"weight": 1}]}, "adapters.0.name"),
        ({"adapters": [{"name": "a", "model": "b"}]}, "adapters.0.name"),
        ({"adapters": [{"name": "a", "weight": float("inf")}]}, "adapters.0.weight"),
        ({"adapters": [{"name": "a", "weight": "1"}]}, "adapters.0.weight"),
        ({"adapters": [{"name": "a", "wait": 1}]}, "adapters.0.wait"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"user": "x" * 513}, "user"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools.1.function.name"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools.0.function.parameters"),
        ({"tools": [tool("f", {"$ref": "#/$defs/no"})]}, "tools.0.function.parameters"),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"tools": [tool("f", {"anyOf": [{}] * 200})] * 30}, "tools"),
        ({"tools": [tool("f", {"description": "x" * 60_000})] * 5}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "must"}, "tool_choice"),
        (
            {"tools": [tool("f")], "response_format": {"type": "regex", "pattern": "a"}},
            "response_format",
        ),
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"temprature": 1}, "temprature"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": schema_format(OBJECT, name="a b")},
            "response_format.json_schema.name",
        ),
    ],
    ids=str,
)
def test_a_bad_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        [],
        "object",
        {"type": "objekt"},
        {"properties": []},
        {"pattern": "("},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "other.json#/a"},
        {"$ref": "#/$defs/missing"},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"y": {}}},
        {"description": "x" * 70_000},
        nested(40),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_bad_schema_is_named(schema: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(response_format=schema_format(schema))
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#"}, {}]}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"properties": {"a/b": {}, "c": {"$ref": "#/properties/a~1b"}}},
        {"allOf": [{"type": "string"}, {"$ref": "#/allOf/0"}]},
        nested(10),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_good_schema_passes(schema: dict[str, Any]) -> None:
    body = chat(response_format=schema_format(schema, strict=True, description="d"))
    assert body.response_format is not None
    assert body.response_format.json_schema is not None
    assert body.response_format.json_schema.schema_ == schema


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"nul",
        b'{"model": "m",}',
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_cannot_be_read_as_json_is_said_to_be_so(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"not valid JSON|nested too deeply"):
        parse_body(ChatBody, raw)


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"x"', b"5"])
def test_json_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body: it must be an object"):
        parse_body(ChatBody, raw)


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 13}, "n"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [2**40]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 17, "n": 16}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"messages": MESSAGES}, "messages"),
    ],
    ids=str,
)
def test_a_bad_completion_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert (caught.value.param or "").startswith(param.split(".")[0])


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(ChatBody, b'{"model": "m"}')
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_fields_that_make_no_difference_are_taken() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        functions=None,
        n=1,
        modalities=["text"],
        stop=None,
        temperature=None,
        response_format={"type": "text", "json_schema": None, "pattern": None, "choices": None},
    )


def test_parts_of_a_message_are_joined_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": parts}, *MESSAGES])
    assert body.messages[0].rendered() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    "choice,names,mode",
    [
        (None, ["f", "g"], "auto"),
        ("auto", ["f", "g"], "auto"),
        ("required", ["f", "g"], "required"),
        ("none", [], None),
        (named("g"), ["f", "g"], "=g"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("g")]}},
            ["g"],
            "required",
        ),
    ],
    ids=str,
)
def test_the_choice_among_tools(choice: Any, names: list[str], mode: str | None) -> None:
    tools, told = chat(tools=[tool("f"), tool("g")], tool_choice=choice).callable_tools()
    assert ([each.function.name for each in tools], told) == (names, mode)


def test_a_chat_with_calls_is_rendered_with_arguments_as_objects() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "call_1"},
    ]
    rendered = chat(messages=messages).rendered_messages()
    assert rendered[0] == {"role": "system", "content": "be brief"}
    assert rendered[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert rendered[2] == {
        "role": "tool",
        "content": "42",
        "tool_call_id": "call_1",
        "name": "f",
    }


def test_a_repeated_call_id_means_the_latest_call_before_the_result() -> None:
    """Some clients count the calls of each message anew; training reads such rows alike."""
    named = [{**CALL, "function": {"name": n, "arguments": "{}"}} for n in ("f", "g", "h")]
    result = {"role": "tool", "content": "1", "tool_call_id": CALL["id"]}
    messages: list[Any] = [{"role": "user", "content": "x"}]
    for call in named:
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    messages += [result, {"role": "assistant", "content": "done"}]
    rendered = chat(messages=messages).rendered_messages()
    assert [each["name"] for each in rendered if each["role"] == "tool"] == ["f", "g", "h", "h"]
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
    assert read_row({"messages": messages, "tools": tools}).messages == rendered


@pytest.mark.parametrize("arguments", ["[" * 300 + "]" * 300, '{"a": "\\ud800"}', '{"a"'], ids=len)
def test_arguments_that_cannot_be_handed_on_stay_text(arguments: str) -> None:
    """A worker would fail on them; they are the model's own words of before, or a client's."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    body = chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    (rendered,) = body.rendered_messages()[1]["tool_calls"]
    assert rendered["function"]["arguments"] == arguments


MANY: Any = [{}] * 50_000
NAMES = {f"k{i}": "" for i in range(50_000)}


@pytest.mark.parametrize(
    "kind,fields",
    [
        (ChatBody, NAMES),
        (ChatBody, {"modalities": MANY}),
        (ChatBody, {"messages": MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": MANY}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x", **NAMES}]}),
        (ChatBody, {"logit_bias": NAMES}),
        (ChatBody, {"metadata": dict.fromkeys(NAMES, 1)}),
        (ChatBody, {"tools": MANY}),
        (ChatBody, {"response_format": {"type": "choice", "choices": MANY}}),
        (CompletionBody, {"prompt": MANY}),
        (CompletionBody, {"prompt": [MANY]}),
        (ResponsesBody, {"input": MANY}),
        (ResponsesBody, {"input": [{"role": "user", "content": MANY}]}),
        (ResponsesBody, {"input": "x", "tools": MANY}),
        (ResponsesBody, {"input": "x", "include": MANY}),
        (GenerateBody, {"inputs": "x", **NAMES}),
        (GenerateBody, {"inputs": "x", "parameters": NAMES}),
        (
            GenerateBody,
            {"inputs": "x", "parameters": {"merged_adapters": {"ids": ["a"], "weights": MANY}}},
        ),
    ],
    ids=range(18),
)
def test_a_body_full_of_faults_is_not_looked_at_to_its_end(
    kind: type[Body], fields: dict[str, Any]
) -> None:
    """Each fault that is kept takes a kilobyte: those of 8 MiB would end the gateway."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(fields))
    assert caught.value.error_count() < 50


def test_tools_are_bounded_before_their_schemas_are_read() -> None:
    tools = [tool(f"f{i}", {"anyOf": [{"title": str(i)}] * 1500}) for i in range(12)]
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="objects in it"):
        chat(tools=tools)
    assert time.process_time() - started < 0.5
