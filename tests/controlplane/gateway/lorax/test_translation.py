"""What the bodies of LoRAX's and TGI's clients become, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.errors import InvalidRequest
from controlplane.gateway.lorax import translation
from controlplane.gateway.lorax.schemas import GenerateBody
from controlplane.inference.parsing import parse_body
from controlplane.inference.schemas import ChatBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def chat(**parameters: Any) -> ChatBody:
    sent = json.dumps({"inputs": "x", "parameters": parameters}).encode()
    body = parse_body(GenerateBody, sent)
    return translation.chat_body(body, base_model="tiny", seed=None, stream=False)


@pytest.mark.parametrize(
    "grammar",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "value": {"schema": SCHEMA}},
    ],
)
def test_a_grammar_of_tgi_constrains_the_answer_by_its_schema(grammar: Any) -> None:
    constraint = chat(grammar=grammar).constraint
    assert constraint is not None and constraint.schema == SCHEMA


def test_a_grammar_of_tgi_is_a_regular_expression() -> None:
    constraint = chat(grammar={"type": "regex", "value": "[0-9]{3}"}).constraint
    assert constraint is not None and constraint.pattern == "[0-9]{3}"
    assert chat(grammar=None).constraint is None


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"grammar": {"type": "regex"}}, "parameters.grammar"),
        ({"grammar": {"type": "json", "value": 5}}, "parameters.grammar"),
        ({"grammar": {"type": "ebnf", "value": "x"}}, "parameters.grammar.value"),
        ({"grammar": {"type": "regex", "value": "("}}, "parameters.grammar"),
        (
            {
                "grammar": {"type": "regex", "value": "a"},
                "response_format": {"type": "json_object"},
            },
            "parameters.grammar",
        ),
        ({"frequency_penalty": 0.5}, "parameters.frequency_penalty"),
        ({"top_n_tokens": 3}, "parameters.top_n_tokens"),
        ({"adapter_id": "org/name", "adapter_source": "s3"}, "parameters.adapter_source"),
        (
            {
                "merged_adapters": {"ids": ["a", "org/name"], "weights": [1, 1]},
                "adapter_source": "local",
            },
            "parameters.adapter_source",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(parameters: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**parameters)
    assert caught.value.param is not None and caught.value.param.startswith(param)


@pytest.mark.parametrize(
    ("adapter_id", "name"),
    [("org/name", "org/name"), ("invoices", "invoices"), ("invoices/3", "invoices@3")],
)
@pytest.mark.parametrize("source", [None, "hub"])
def test_an_adapter_id_is_a_name_or_a_repository(
    adapter_id: str, name: str, source: str | None
) -> None:
    assert chat(adapter_id=adapter_id, adapter_source=source).model == name
