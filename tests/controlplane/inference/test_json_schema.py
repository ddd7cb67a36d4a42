"""Schemas are bounded, and those that no finite answer satisfies are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from controlplane.inference.json_schema import MAX_SCHEMA_DEPTH, checked_schema

ROOT = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def of_node(node: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"$defs": {"node": node}, **NODE, **fields}


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        ROOT,
        {"allOf": [ROOT]},
        {"anyOf": [ROOT, {"allOf": [ROOT]}]},
        {"type": "object", "properties": {"k": ROOT}, "required": ["k"]},
        {"type": "array", "items": ROOT, "minItems": 1},
        {"type": "array", "prefixItems": [{}, ROOT], "minItems": 2},
        of_node({"type": "object", "properties": {"next": NODE}, "required": ["next"]}),
        of_node({"$ref": "#/$defs/other"}, **{"$defs": {"node": ROOT}}),
    ],
    ids=str,
)
def test_a_schema_that_requires_itself_without_end_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(PydanticCustomError, match="without end"):
        checked_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"anyOf": [ROOT, {"type": "integer"}]},
        {"type": "object", "properties": {"k": ROOT}},
        {"type": "array", "items": ROOT},
        {"type": ["object", "null"], "properties": {"k": ROOT}, "required": ["k"]},
        of_node(
            {
                "type": "object",
                "properties": {"next": {"anyOf": [NODE, {"type": "null"}]}, "value": {}},
                "required": ["next", "value"],
            }
        ),
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    ],
    ids=str,
)
def test_recursion_that_can_end_is_fine(schema: dict[str, Any]) -> None:
    assert checked_schema(schema) is schema


def test_many_paths_to_one_end_take_no_time() -> None:
    defs: dict[str, Any] = {"n0": {"type": "string"}}
    for i in range(1, 60):
        part = {"$ref": f"#/$defs/n{i - 1}"}
        defs[f"n{i}"] = {"allOf": [part, part], "anyOf": [part, part]}
    checked_schema({"$defs": defs, "$ref": "#/$defs/n59"})


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nest(MAX_SCHEMA_DEPTH), "deeper"),
        ({"$ref": "https://example.com/s"}, "own parts"),
        ({"$ref": "#/$defs/none"}, "not in it"),
        ({"type": "text"}, "no valid JSON Schema"),
        ({"enum": ["x" * 70_000]}, "longer"),
    ],
    ids=["deep", "remote", "dangling", "type", "long"],
)
def test_what_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(PydanticCustomError, match=problem):
        checked_schema(schema)
