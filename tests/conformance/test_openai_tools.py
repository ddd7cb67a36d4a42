"""Tools through the official client, with a real engine: a random model, so all that is right
about a call is the grammar's doing."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from contract.messages.protocol import CALL_BEGIN, CALL_END
from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_NAME
from tests.tiny_base import ROOMY_NAME

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "unit", "place"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"floor": {"type": "integer", "minimum": 0, "maximum": 5}},
            "required": ["floor"],
            "additionalProperties": False,
        }
    },
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 8}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "take_note": NOTE}


def tool(name: str, **fields: Any) -> Any:
    function = {"name": name, "description": f"Does {name}.", "parameters": SCHEMAS[name]}
    return {"type": "function", "function": {**function, **fields}}


TOOLS: Any = [tool("get_weather", strict=True), tool("take_note")]


def check(calls: Any) -> list[str]:
    """The names of the calls, whose arguments obey their schemas."""
    assert calls
    for call in calls:
        assert call.id.startswith("call_")
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_forced_call_obeys_its_schema(served: Served, stream: bool, temperature: int) -> None:
    create = served.client().chat.completions
    options: dict[str, Any] = {
        "model": ROOMY_NAME,
        "messages": say("weather?"),
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": temperature,
        "seed": 5,
    }
    if stream:
        with create.stream(**options) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = create.create(**options)
    (choice,) = answer.choices
    assert check(choice.message.tool_calls) == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None


def test_one_of_all_tools_must_be_called(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=ROOMY_NAME,
        messages=say("do something"),
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        n=4,
        seed=1,
    )
    for choice in answer.choices:
        assert len(check(choice.message.tool_calls)) == 1
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 4


def test_left_to_itself_it_answers_with_text_or_calls(served: Served) -> None:
    answer = served.client().chat.completions.create(
        model=ROOMY_NAME, messages=say("hi"), tools=TOOLS, n=4, max_tokens=20, seed=3
    )
    for choice in answer.choices:
        assert choice.message.tool_calls or choice.message.content is not None
        assert not (choice.message.content or "").lstrip().startswith("<tool_call>")


def test_a_conversation_with_calls_goes_on(served: Served) -> None:
    """The echoing engine answers with the tool's result as its prompt has it."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    messages: Any = [
        *say("be brief", "developer"),
        *say("weather in Oslo?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    answer = served.client().chat.completions.create(model=FAKE_NAME, messages=messages)
    assert "rain" in (answer.choices[0].message.content or "")


def test_tools_from_pydantic_models_are_parsed(served: Served) -> None:
    class Note(BaseModel):
        stars: bool
        level: int

    answer = served.client().chat.completions.parse(
        model=ROOMY_NAME,
        messages=say("note"),
        tools=[openai.pydantic_function_tool(Note)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        seed=2,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Note)


def test_a_strict_tool_that_cannot_be_enforced_is_refused(served: Served) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object"}, "uniqueItems": True}},
        "required": ["a"],
        "additionalProperties": False,
    }
    strict = tool("take_note", parameters=parameters, strict=True)
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(
            model=ROOMY_NAME, messages=say("x"), tools=[tool("get_weather"), strict]
        )
    assert caught.value.param == "tools.1.function.parameters"
    assert caught.value.code == "invalid_function_parameters"


UNIQUE = {
    "type": "object",
    "properties": {"days": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["days"],
    "additionalProperties": False,
}


def called(arguments: str) -> str:
    """What the echoing engine answers as if a model had written it."""
    return f'{CALL_BEGIN}{{"name": "f", "arguments": {arguments}}}{CALL_END}'


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_model_that_breaks_what_is_only_checked_is_told_of(served: Served, stream: bool) -> None:
    """The only arguments that there can be have two zeros."""
    zero = {"type": "integer", "minimum": 0, "maximum": 0, "multipleOf": 1}
    zeros = {"type": "array", "items": zero, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    parameters = {**UNIQUE, "properties": {"days": zeros}}
    pick: Any = {"type": "function", "function": {"name": "pick", "parameters": parameters}}
    answer: Any = served.client().chat.completions.create(
        model=ROOMY_NAME,
        messages=say("x"),
        tools=[pick],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=stream,
    )
    choice = [chunk.choices[0] for chunk in answer][-1] if stream else answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.schema_error == "call 0 of pick: at /days: [0, 0] has non-unique elements"


#: Short, for the echoing engine's context is.
PICK: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}},
}
COUNT: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_finished_call_is_checked_against_its_own_schema(served: Served, stream: bool) -> None:
    """As an answer is: by jsonschema, for what the linter says is checked after."""
    raw = served.client().chat.completions.with_raw_response.create(
        model=FAKE_NAME, messages=say(called('{"a": [3, 3]}')), tools=[PICK], stream=stream
    )
    assert raw.headers["lorikeet-schema-checked"] == "f:/properties/a/uniqueItems"
    answer: Any = raw.parse()
    choice = [chunk.choices[0] for chunk in answer][-1] if stream else answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.schema_error == "call 0 of f: at /a: [3, 3] has non-unique elements"


@pytest.mark.parametrize(
    ("arguments", "max_tokens", "reason"),
    [('{"a": [3, 4]}', None, "tool_calls"), ('{"a": [3, 3]}', 46, "length")],
    ids=["obeys", "cut off"],
)
def test_a_call_that_obeys_or_is_not_finished_says_nothing(
    served: Served, arguments: str, max_tokens: int | None, reason: str
) -> None:
    answer = served.client().chat.completions.create(
        model=FAKE_NAME, messages=say(called(arguments)), tools=[PICK], max_tokens=max_tokens
    )
    (choice,) = answer.choices
    assert choice.finish_reason == reason
    (call,) = choice.message.tool_calls or []
    assert arguments.startswith(call.function.arguments)  # type: ignore[union-attr]
    assert "schema_error" not in (choice.model_extra or {})


def test_a_strict_tools_broken_call_is_a_defect_of_ours(served: Served) -> None:
    """No engine with grammars writes one; the echoing engine has none."""
    messages = say(called('{"a": "x"}'))
    create = served.client().chat.completions.create
    with pytest.raises(openai.InternalServerError) as caught:
        create(model=FAKE_NAME, messages=messages, tools=[COUNT])
    assert (caught.value.code, caught.value.param) == ("answer_invalid", "tools")
    assert "call 0 of f: at /a" in caught.value.message
    with pytest.raises(openai.APIError, match="call 0 of f: at /a"):
        list(create(model=FAKE_NAME, messages=messages, tools=[COUNT], stream=True))
