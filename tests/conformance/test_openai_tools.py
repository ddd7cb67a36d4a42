"""Tools through the official client, with a real engine: a random model, so all that is right
about a call is the grammar's doing."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

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
