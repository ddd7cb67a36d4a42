"""Schemas and tools through LoRAX's client and the Responses API, with a real engine: a random
model, so all that is right about an answer is the grammar's doing."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from tests.conformance.conftest import Served
from tests.controlplane.gateway.lorax.conftest import LoraxClient, lorax_client
from tests.tiny_base import ROOMY_NAME

__all__ = ["lorax_client"]  # a fixture

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


class Answer(BaseModel):
    unit: Literal["C", "F"]
    is_hot: bool


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("call", ["generate", "generate_stream"])
def test_loraxs_schema_is_obeyed(
    served: Served, lorax_client: LoraxClient, call: str, sample: bool
) -> None:
    answer = lorax_client.call(
        call,
        served.url,
        served.key(),
        prompt="weather?",
        adapter_id=ROOMY_NAME,
        response_format={"type": "json_object", "schema": SCHEMA},
        max_new_tokens=400,
        **({"do_sample": True, "seed": 7} if sample else {}),
    )
    last = answer[-1] if call == "generate_stream" else answer
    assert last["details"]["finish_reason"] == "eos_token", last
    jsonschema.validate(json.loads(last["generated_text"]), SCHEMA)
    tokens = [event["token"] for event in answer] if last is not answer else None
    tokens = tokens or answer["details"]["tokens"]
    said = "".join(token["text"] for token in tokens if not token["special"])
    assert said == last["generated_text"]


def test_loraxs_seed_draws_the_same_again(served: Served, lorax_client: LoraxClient) -> None:
    options = {"prompt": "x", "adapter_id": ROOMY_NAME, "max_new_tokens": 12, "do_sample": True}
    first = lorax_client.call("generate", served.url, served.key(), **options)
    seed = first["details"]["seed"]
    again = lorax_client.call("generate", served.url, served.key(), seed=seed, **options)
    assert again["details"]["tokens"] == first["details"]["tokens"]


def test_a_response_is_parsed(served: Served) -> None:
    response = served.client().responses.parse(
        model=ROOMY_NAME, input="hot?", text_format=Answer, max_output_tokens=300
    )
    assert isinstance(response.output_parsed, Answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_responses_call_obeys_its_schema(served: Served, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": ROOMY_NAME,
        "input": "weather?",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "get_weather"},
    }
    if stream:
        with served.client().responses.stream(**options) as events:
            response: Any = events.get_final_response()
    else:
        response = served.client().responses.create(**options)
    [call] = response.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
