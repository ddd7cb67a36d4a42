"""Bounds on a schema, checked before any expensive work on it."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError

from controlplane.schemas.endless import requires_itself
from controlplane.schemas.findings import BadSchema
from controlplane.schemas.pointers import References, join
from controlplane.schemas.subschemas import children

MAX_BYTES = 64 * 1024
#: Most levels of schemas inside schemas, and of JSON inside JSON, as in a `const`.
MAX_DEPTH, MAX_JSON_DEPTH = 16, 64
MAX_PROPERTIES = 500
#: Most schemas of all kinds: each takes 0.1 ms of the schema's own check.
MAX_SCHEMAS = 2000
MAX_ENUM_VALUES = 1000


def check_size(schema: dict[str, Any]) -> None:
    """Raise BadSchema for a schema that is too long or too deep."""
    _check_json_depth(schema)
    if len(json.dumps(schema, separators=(",", ":")).encode()) > MAX_BYTES:
        raise BadSchema(f"is longer than {MAX_BYTES} bytes")


def check(schema: dict[str, Any]) -> None:
    """Raise BadSchema, with the problem and its place, unless the schema can be used."""
    _check_parts(schema)
    try:
        # Without formats: Python would read the patterns, which `plan` reads as ECMA-262's, and
        # keep them for all tenants.
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        raise BadSchema(
            f"is no valid JSON Schema: {error.message[:300]}", join("", *error.absolute_path)
        ) from error
    if requires_itself(schema):
        raise BadSchema("requires itself without end, so no answer can satisfy it")


def _check_json_depth(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        level = inner
        if not level:
            return
    raise BadSchema(f"is nested deeper than {MAX_JSON_DEPTH} levels of JSON")


def _check_parts(schema: dict[str, Any]) -> None:
    references = References(schema)
    num_properties = num_values = num_schemas = 0
    level: list[tuple[str, Any]] = [("", schema)]
    for _ in range(MAX_DEPTH):
        num_schemas += len(level)
        if num_schemas > MAX_SCHEMAS:
            raise BadSchema(f"has more than {MAX_SCHEMAS} schemas in it")
        inner: list[tuple[str, Any]] = []
        for at, node in level:
            if not isinstance(node, dict):
                continue
            if isinstance(reference := node.get("$ref"), str):
                references.pointer(reference, join(at, "$ref"))
            if isinstance(names := node.get("properties"), dict):
                num_properties += len(names)
            if isinstance(values := node.get("enum"), list):
                num_values += len(values)
            if num_properties > MAX_PROPERTIES:
                raise BadSchema(f"has more than {MAX_PROPERTIES} properties", at)
            if num_values > MAX_ENUM_VALUES:
                raise BadSchema(f"has more than {MAX_ENUM_VALUES} enum values", at)
            inner += children(node, at)
        level = inner
        if not level:
            return
    raise BadSchema(f"is nested deeper than {MAX_DEPTH} schemas", level[0][0])
