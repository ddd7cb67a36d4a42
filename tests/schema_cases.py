"""Schemas of every kind, with values that obey them and values that do not.

Each case of ENFORCED is obeyed by whatever the decoder makes; each of CHECKED is not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}


class Case(NamedTuple):
    schema: dict[str, Any]
    good: tuple[Any, ...]
    bad: tuple[Any, ...] = ()


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object of just these properties, all of them."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def optional(*names: str, **more: Any) -> dict[str, Any]:
    """An object of some of these properties, integers all."""
    return {
        "type": "object",
        "properties": dict.fromkeys(names, INT),
        "additionalProperties": False,
        **more,
    }


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


_NODE = closed({"v": INT, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}})
_LINK = closed({"v": INT, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}})
_MATRIX: dict[str, Any] = {"type": "boolean"}
for _ in range(3):
    _MATRIX = {"type": "array", "items": _MATRIX, "minItems": 1, "maxItems": 2}
_BY_KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b", "c"]}, "v": {}},
    "required": ["kind", "v"],
    "additionalProperties": False,
}

ENFORCED: dict[str, Case] = {
    "type": Case({"type": "integer"}, (1, -20), ("a", 1.5, None)),
    "types": Case({"type": ["integer", "null"]}, (1, None), ("a",)),
    "nothing but true": Case(closed({"a": True}), ({"a": 1}, {"a": []}), ({}, {"b": 1})),
    "enum": Case({"enum": [1, "x", None, {"a": 1}]}, (1, "x", None, {"a": 1}), (2, "y")),
    "enum and type": Case({"enum": [1, "x"], "type": "string"}, ("x",), (1,)),
    "const": Case({"const": {"a": [1, "é"]}}, ({"a": [1, "é"]},), ({"a": [2]},)),
    "minimum": Case({"type": "integer", "minimum": 3}, (3, 10), (2, -1)),
    "maximum": Case({"type": "integer", "maximum": 30}, (3, -10), (31, 100)),
    "exclusiveMinimum": Case({"type": "number", "exclusiveMinimum": 3.5}, (3.6, 10), (3.5, 1)),
    "exclusiveMaximum": Case({"type": "number", "exclusiveMaximum": 0.5}, (0.4, -1), (0.5, 1)),
    "bounds of numbers": Case(
        {"type": "number", "minimum": -1.5, "maximum": 2.25}, (0, 2.25), (3,)
    ),
    "huge bounds": Case({"type": "integer", "maximum": 1e21}, (5,)),
    "multipleOf": Case({"type": "integer", "multipleOf": 7}, (14, -7), (8,)),
    "multipleOf 0.01": Case(
        {"type": "number", "multipleOf": 0.01, "minimum": 0}, (1.25,), (1.255,)
    ),
    "multipleOf 0.003": Case({"type": "number", "multipleOf": 0.003}, (0.9, 6), (0.301, 0.1)),
    "minLength": Case(text(minLength=2), ("ab", "éé"), ("a", "é")),
    "maxLength": Case(text(maxLength=3), ("", "éßü"), ("abcd",)),
    "endless maxLength": Case(text(maxLength=10**9, minLength=1), ("a",), ("",)),
    "pattern": Case(text(pattern="^[a-z]{2}$"), ("ab",), ("a", "abc", "AB")),
    "pattern anywhere": Case(text(pattern="[0-9]{2}", maxLength=6), ("ab12", "12"), ("a1b2",)),
    "pattern of ways": Case(text(pattern="^a|b$", maxLength=4), ("ax", "xb"), ("xx",)),
    "pattern of classes": Case(text(pattern=r"^\w+\s\d$"), ("ab 1",), ("ab-1", "é 1")),
    "pattern of quotes": Case(text(pattern='^["\\\\\n]$'), ('"', "\\", "\n"), ("a",)),
    "pattern and length": Case(text(pattern="^a+$", maxLength=3), ("aaa",), ("aaaa", "")),
    "two patterns": Case(
        text(allOf=[{"pattern": "^a"}, {"pattern": "b$"}], maxLength=5), ("ab", "axb"), ("a", "b")
    ),
    "format date": Case(text(format="date"), ("2024-02-29",), ("2023-02-29", "2024-04-31", "x")),
    "format time": Case(text(format="time"), ("23:59:59Z", "12:00:00.5+01:00"), ("24:00:00Z",)),
    "format date-time": Case(
        text(format="date-time"), ("2024-02-29T00:00:00Z",), ("2024-02-30T00:00:00Z", "2024-01-01")
    ),
    "format uuid": Case(text(format="uuid"), ("12345678-1234-1234-1234-1234567890ab",), ("12",)),
    "format email": Case(text(format="email"), ("a.b@example.com",), ("a@b", "a b@c.de", "@c.de")),
    "format ipv4": Case(text(format="ipv4"), ("127.0.0.1",), ("256.0.0.1", "1.2.3")),
    "format ipv6": Case(text(format="ipv6"), ("::1", "fe80::1"), ("1.2.3.4", ":::")),
    "format hostname": Case(text(format="hostname", maxLength=20), ("a-b.example",), ("-a", "a b")),
    "format uri": Case(text(format="uri", maxLength=30), ("https://a.example/b?c",), ("a b",)),
    "format duration": Case(text(format="duration", maxLength=9), ("P1DT2H", "P2W"), ("1D", "P")),
    "format json-pointer": Case(
        text(format="json-pointer", maxLength=9), ("", "/a~1b"), ("a", "/~")
    ),
    "format and pattern": Case(
        text(format="date", pattern="^2020"), ("2020-01-01",), ("2021-01-01",)
    ),
    "properties": Case(closed({"a": INT, "b": TEXT}), ({"a": 1, "b": ""},), ({"a": "x", "b": ""},)),
    "required": Case(
        {"type": "object", "properties": {"a": INT, "b": {}}, "required": ["a", "b"]},
        ({"a": 1, "b": 2},),
        ({}, {"a": 1}),
    ),
    "additionalProperties": Case(
        {"type": "object", "additionalProperties": INT}, ({}, {"z": 1}), ({"z": "a"},)
    ),
    "patternProperties": Case(
        {
            "type": "object",
            "patternProperties": {"^s_": TEXT, "^i_": INT},
            "additionalProperties": False,
        },
        ({"s_a": "x", "i_b": 1}, {}),
        ({"s_a": 1}, {"x": 1}),
    ),
    "patternProperties over a property": Case(
        closed({"score": INT}, patternProperties={"^score$": {"minimum": 5}}),
        ({"score": 7},),
        ({"score": 1}, {}),
    ),
    "propertyNames": Case(
        {"type": "object", "propertyNames": {"pattern": "^x[a-z]$"}, "additionalProperties": INT},
        ({"xa": 1}, {}),
        ({"a": 1}, {"xa": "b"}),
    ),
    "propertyNames of an enum": Case(
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        ({"a": 1, "b": 1},),
        ({"c": 1},),
    ),
    "propertyNames beside properties": Case(
        {
            "type": "object",
            "properties": {"xa": TEXT, "b": TEXT},
            "propertyNames": {"pattern": "^x"},
            "additionalProperties": INT,
        },
        ({"xa": ""}, {"xz": 1}),
        ({"b": ""}, {"xa": 1}),
    ),
    "minProperties": Case(
        optional("a", "b", "c", minProperties=2), ({"a": 1, "c": 1},), ({"a": 1}, {})
    ),
    "minProperties, as required": Case(
        closed({"a": INT, "b": INT}, minProperties=2), ({"a": 1, "b": 1},), ({"a": 1},)
    ),
    "maxProperties": Case(
        optional("a", "b", "c", maxProperties=1), ({"b": 1}, {}), ({"a": 1, "b": 1},)
    ),
    "maxProperties of free names": Case(
        {"type": "object", "additionalProperties": INT, "maxProperties": 1},
        ({"z": 1}, {}),
        ({"y": 1, "z": 1},),
    ),
    "dependentRequired": Case(
        optional("a", "b", "c", dependentRequired={"a": ["b"]}),
        ({"a": 1, "b": 1}, {"c": 1}, {}),
        ({"a": 1}, {"a": 1, "c": 1}),
    ),
    "dependentSchemas": Case(
        optional("a", "b", dependentSchemas={"a": {"properties": {"b": {"minimum": 5}}}}),
        ({"a": 1, "b": 5}, {"b": 1}, {"a": 1}),
        ({"a": 1, "b": 4},),
    ),
    "unevaluatedProperties": Case(
        {"type": "object", "properties": {"a": INT}, "unevaluatedProperties": False},
        ({"a": 1}, {}),
        ({"b": 1},),
    ),
    "items": Case({"type": "array", "items": INT}, ([], [1, 2]), (["a"],)),
    "minItems": Case({"type": "array", "items": INT, "minItems": 2}, ([1, 2],), ([1], [])),
    "maxItems": Case({"type": "array", "items": INT, "maxItems": 2}, ([1, 2], []), ([1, 2, 3],)),
    "prefixItems": Case(
        {"type": "array", "prefixItems": [INT, TEXT], "items": False, "minItems": 1},
        ([1], [1, "a"]),
        (["a"], [], [1, "a", 2]),
    ),
    "unevaluatedItems": Case(
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False}, ([1], []), ([1, 2],)
    ),
    "uniqueItems of an enum": Case(
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        (["a"], ["b", "a", "c"]),
        (["a", "a"], []),
    ),
    "uniqueItems of one": Case(
        {"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, ([1], []), ([1, 1],)
    ),
    "deep arrays": Case(_MATRIX, ([[[True]]],), ([[True]], [[[]]])),
    "$ref": Case(
        {"$defs": {"p": closed({"x": INT})}, **closed({"a": {"$ref": "#/$defs/p"}})},
        ({"a": {"x": 1}},),
        ({"a": {}},),
    ),
    "$ref beside bounds": Case(
        {"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 5, "maximum": 9}, (5, 9), (4, 10)
    ),
    "$anchor": Case({"$defs": {"n": {"$anchor": "it", **INT}}, "$ref": "#it"}, (5,), ("a",)),
    "definitions": Case({"definitions": {"n": INT}, "$ref": "#/definitions/n"}, (5,), ("a",)),
    "a tree": Case(
        {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"},
        ({"v": 1, "kids": [{"v": 2, "kids": []}]},),
        ({"v": 1, "kids": [{"v": 2}]},),
    ),
    "a list": Case(
        {"$defs": {"n": _LINK}, "$ref": "#/$defs/n", "title": "List"},
        ({"v": 1, "next": {"v": 2, "next": None}},),
        ({"v": 1},),
    ),
    "the whole again": Case(
        {
            "type": "object",
            "properties": {
                "v": INT,
                "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
            },
            "required": ["v"],
            "additionalProperties": False,
        },
        ({"v": 1, "kids": [{"v": 2}]},),
        ({"v": 1, "kids": [{}]},),
    ),
    "anyOf": Case({"anyOf": [INT, closed({"a": INT})]}, (1, {"a": 1}), ("a", {})),
    "anyOf beside properties": Case(
        optional("a", "b", anyOf=[{"required": ["b"]}, {"properties": {"a": {"minimum": 5}}}]),
        ({"a": 1, "b": 1}, {"a": 5}),
        ({"a": 4},),
    ),
    "allOf": Case(
        {"allOf": [closed({"a": INT}), {"properties": {"a": {"minimum": 3}}}]},
        ({"a": 3},),
        ({"a": 2}, {}),
    ),
    "allOf of a base": Case(
        {
            "$defs": {"base": {"type": "object", "properties": {"id": INT}, "required": ["id"]}},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"n": TEXT}, "required": ["n"]}],
        },
        ({"id": 1, "n": ""},),
        ({"id": 1}, {"n": ""}),
    ),
    "oneOf by a const": Case(
        {
            "oneOf": [
                closed({"kind": {"const": "a"}, "v": INT}),
                closed({"kind": {"const": "b"}, "w": TEXT}),
            ]
        },
        ({"kind": "a", "v": 1}, {"kind": "b", "w": ""}),
        ({"kind": "a", "w": ""}, {"kind": "c"}),
    ),
    "oneOf of types": Case({"oneOf": [INT, TEXT, {"type": "null"}]}, (1, "a", None), (True, [])),
    "oneOf of properties": Case(
        optional("a", "b", oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ({"a": 1}, {"b": 1}),
        ({}, {"a": 1, "b": 1}),
    ),
    "oneOf of ranges": Case(
        {"type": "integer", "oneOf": [{"maximum": 5}, {"minimum": 10}]}, (5, 10), (6, 9)
    ),
    "not an enum value": Case({"enum": ["x", "y", "z"], "not": {"const": "y"}}, ("x", "z"), ("y",)),
    "not a text": Case(
        text(maxLength=3, not_={"enum": ["", "a", "ab"]}), ("b", "abc"), ("", "a", "ab")
    ),
    "not a type": Case({"not": {"type": ["object", "array", "string"]}}, (1, None), ("a", {}, [])),
    "not a property": Case(
        optional("a", "b", not_={"required": ["a"]}), ({"b": 1}, {}), ({"a": 1},)
    ),
    "not a number": Case(
        {"type": "integer", "minimum": 0, "maximum": 3, "not": {"const": 2}}, (0, 1, 3), (2,)
    ),
    "if then else": Case(
        {
            **_BY_KIND,
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"properties": {"v": INT}},
            "else": {"properties": {"v": {"type": "boolean"}}},
        },
        ({"kind": "a", "v": 1}, {"kind": "b", "v": True}),
        ({"kind": "a", "v": True}, {"kind": "c", "v": 1}),
    ),
    "two conditions": Case(
        {
            **_BY_KIND,
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                    "then": {"properties": {"v": then}},
                }
                for kind, then in (("a", INT), ("b", {"type": "null"}))
            ],
        },
        ({"kind": "a", "v": 1}, {"kind": "b", "v": None}, {"kind": "c", "v": "x"}),
        ({"kind": "a", "v": None}, {"kind": "b", "v": 1}),
    ),
    "annotations": Case(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://example.com/s",
            "$comment": "c",
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": False,
            "readOnly": True,
            "x-order": 3,
            **INT,
        },
        (1,),
        ("a",),
    ),
}
for _case in ENFORCED.values():
    if "not_" in _case.schema:  # a word of Python's
        _case.schema["not"] = _case.schema.pop("not_")

#: Name -> a schema with one keyword that is only checked, and values that break just that one.
CHECKED: dict[str, Case] = {
    "uniqueItems": Case({"type": "array", "items": INT, "uniqueItems": True}, ([1, 2],), ([1, 1],)),
    "contains": Case({"type": "array", "contains": {"const": 1}}, ([1],), ([2],)),
    "minContains": Case(
        {"type": "array", "contains": {"const": 1}, "minContains": 2}, ([1, 1],), ([1],)
    ),
    "maxContains": Case(
        {"type": "array", "contains": {"const": 1}, "maxContains": 1}, ([1],), ([1, 1],)
    ),
    "minProperties": Case(
        {"type": "object", "additionalProperties": INT, "minProperties": 1}, ({"a": 1},), ({},)
    ),
    "maxProperties": Case(
        {"type": "object", "properties": {"a": INT}, "maxProperties": 1},
        ({"a": 1},),
        ({"a": 1, "b": 1},),
    ),
    "oneOf": Case({"oneOf": [INT, {"type": "number"}]}, (1.5,), (1,)),
    "not": Case({"not": {"type": "object", "required": ["a"]}}, (1, {}), ({"a": 1},)),
    "if": Case({"if": {"type": "string"}, "then": {"minLength": 3}}, ("abc", 1), ("a",)),
    "pattern": Case(text(pattern=r"\bfoo\b"), ("a foo",), ("afoo",)),
    "multipleOf": Case({"type": "integer", "multipleOf": 1_000_003}, (1_000_003,), (5,)),
    "minimum": Case({"type": "number", "minimum": 1e-300}, (1,), (0,)),
    "format": Case(text(format="regex"), ("a+",), ("(",)),
    "propertyNames": Case(
        {"type": "object", "propertyNames": {"not": {"const": "a"}}}, ({"b": 1},), ({"a": 1},)
    ),
    "unevaluatedProperties": Case(
        {"type": "object", "anyOf": [{"properties": {"a": INT}}], "unevaluatedProperties": False},
        ({"a": 1},),
        ({"b": 1},),
    ),
}

#: Name -> a schema with one keyword that nothing here looks at.
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "minimun": {"type": "integer", "minimun": 3},
    "nullable": text(nullable=True),
    "pattern": text(pattern="^(?=.*[0-9])[a-z0-9]+$"),
    "format": text(format="phone"),
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "$dynamicRef": {
        "$dynamicAnchor": "n",
        "type": "object",
        "properties": {"n": {"$dynamicRef": "#n"}},
    },
}
