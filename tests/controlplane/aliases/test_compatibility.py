"""Which changes of a published schema break callers."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.aliases.compatibility import breaking_changes

OLD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "total": {"type": "number", "minimum": 0},
        "name": {"type": "string", "maxLength": 20, "description": "Whose it is."},
        "kind": {"enum": ["a", "b"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 9},
        "id": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["total", "name"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "object", "properties": {"net": {"type": "integer"}}}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """OLD with another value there; None: without it."""

    def at(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
        name, *rest = names
        inner = at(schema[name], rest) if rest else value
        left = {key: schema[key] for key in schema if key != name}
        return left if inner is None else {**left, name: inner}

    return at(OLD, path.split("/"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("properties/total/type", "integer"),
        ("properties/total/minimum", 1),
        ("properties/total/maximum", 5),
        ("properties/name/maxLength", 10),
        ("properties/name/description", "Else."),
        ("properties/name/pattern", "^a"),
        ("properties/kind/enum", ["b"]),
        ("properties/new", {"type": "string"}),
        ("properties/id/anyOf", [{"type": "string"}]),
        ("required", ["total", "name", "kind"]),
        ("additionalProperties", True),
        ("$defs/other", {"type": "null"}),
        ("$defs/line/properties/more", {"type": "null"}),
        ("title", "Invoice"),
    ],
)
def test_what_breaks_nobody(path: str, value: Any) -> None:
    assert breaking_changes(OLD, changed(path, value)) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("type", ["object", "null"], "/type allows null"),
        ("properties/total/type", None, "/properties/total/type is gone"),
        ("properties/total/type", "string", "/properties/total/type allows string"),
        ("properties/total/minimum", -1, "/properties/total/minimum is wider"),
        ("properties/total/minimum", None, "/properties/total/minimum is gone"),
        ("properties/name", None, "/properties/name is gone"),
        ("properties/name", True, "/properties/name is another schema"),
        ("properties/name/maxLength", 21, "/properties/name/maxLength is wider"),
        ("properties/kind/enum", ["a", "c"], "/properties/kind/enum allows other values"),
        ("properties/kind", {"const": "a"}, "/properties/kind/enum is gone"),
        ("properties/lines/items", None, "/properties/lines/items is gone"),
        ("properties/lines/items/$ref", "#/$defs/other", "/properties/lines/items/$ref is changed"),
        ("properties/lines/prefixItems", [True], "/properties/lines/prefixItems is new"),
        ("properties/id/anyOf", [{"type": "integer"}], "/properties/id/anyOf allows other values"),
        ("required", ["total"], "/required/name is no longer required"),
        (
            "$defs/line/properties/net/type",
            "number",
            "/$defs/line/properties/net/type allows number",
        ),
    ],
)
def test_what_breaks_callers(path: str, value: Any, problem: str) -> None:
    assert breaking_changes(OLD, changed(path, value)) == [problem]


def test_maps_have_callers_too() -> None:
    old = {"type": "object", "additionalProperties": {"type": "number"}}
    assert breaking_changes(old, {"type": "object"}) == ["/additionalProperties is gone"]
    wider = {"type": "object", "additionalProperties": {"type": "string"}}
    assert breaking_changes(old, wider) == ["/additionalProperties/type allows string"]
    more = {**old, "properties": {"note": {"type": "string"}}}
    assert breaking_changes(old, more) == ["/properties/note was one of the other properties"]
    assert breaking_changes(old, None) == ["there is no schema any more"]
    assert breaking_changes({"const": 1}, {"const": True}) == ["/const is changed"]
