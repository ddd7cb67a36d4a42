"""Schemas are bounded, and those that no finite answer satisfies are refused."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from controlplane.schemas import BadSchema, plan
from controlplane.schemas.limits import MAX_DEPTH, MAX_JSON_DEPTH
from controlplane.tenancy.scoping import tenant_scope

ROOT = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


def of_node(node: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"$defs": {"node": node}, **NODE, **fields}


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def json_nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


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
    with pytest.raises(BadSchema, match="without end"):
        plan(schema)


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
    assert plan(schema)


def test_many_paths_to_one_end_take_no_time() -> None:
    defs: dict[str, Any] = {"n0": {"type": "string"}}
    for i in range(1, 60):
        part = {"$ref": f"#/$defs/n{i - 1}"}
        defs[f"n{i}"] = {"allOf": [part, part], "anyOf": [part, part]}
    plan({"$defs": defs, "$ref": "#/$defs/n59"})


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nest(MAX_DEPTH), "deeper"),
        ({"const": json_nest(MAX_JSON_DEPTH)}, "levels of JSON"),
        ({"default": json_nest(500)}, "levels of JSON"),
        ({"$ref": "https://example.com/s"}, "own parts"),
        ({"$ref": "#/$defs/none"}, "not in it"),
        ({"$ref": "#none"}, "not in it"),
        ({"$ref": "#/enum", "enum": [1]}, "is not a schema"),
        ({"type": "text"}, "no valid JSON Schema"),
        ({"enum": ["x" * 70_000]}, "longer"),
        ({"enum": list(range(1001))}, "1000 enum values"),
        ({"properties": {f"p{i}": {} for i in range(501)}}, "500 properties"),
        ({"pattern": "("}, "not a regular expression of ECMA-262"),
        ({"minItems": 10**9}, "more than"),
        ({"anyOf": [{}] * 20_000}, "2000 schemas"),
    ],
    ids=range(14),
)
def test_what_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadSchema, match=problem):
        plan(schema)


def test_the_place_of_a_fault_is_named() -> None:
    with pytest.raises(BadSchema) as caught:
        plan({"type": "object", "properties": {"a/b": {"pattern": "["}}})
    assert caught.value.path == "/properties/a~1b/pattern"


def test_a_large_schema_is_planned_soon() -> None:
    """What a gateway does on its event loop."""
    properties = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,8}$"} for i in range(500)}
    branches = [{"required": [f"p{i}"], "minProperties": i} for i in range(60)]
    schema = {"type": "object", "properties": properties, "oneOf": branches}
    started = time.process_time()
    plan(schema)
    assert time.process_time() - started < 1.0


def test_a_schema_is_read_once() -> None:
    """When the body is checked, when the job is made and for the answer's headers."""
    properties = {f"once{i}": {"type": "string"} for i in range(400)}
    with tenant_scope(uuid.uuid4()):
        plan({"properties": properties})
        started = time.process_time()
        plan({"properties": properties})
    assert time.process_time() - started < 0.02
