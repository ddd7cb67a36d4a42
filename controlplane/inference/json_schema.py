"""Bounds on a schema that a request's answer must obey, before anything compiles it."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic_core import PydanticCustomError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32


def checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema itself. Raises PydanticCustomError saying what is wrong and where."""
    if len(json.dumps(schema, separators=(",", ":")).encode()) > MAX_SCHEMA_BYTES:
        raise _invalid(f"is longer than {MAX_SCHEMA_BYTES} bytes")
    _check_depth_and_references(schema)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = "/".join(str(step) for step in error.absolute_path) or "its root"
        raise _invalid(f"is no valid JSON Schema: at {where}: {error.message[:300]}") from error
    return schema


def _check_depth_and_references(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                _check_reference(node, schema)
                inner += node.values()
            elif isinstance(node, list):
                inner += node
        level = inner
        if not level:
            return
    raise _invalid(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")


def _check_reference(node: dict[str, Any], schema: dict[str, Any]) -> None:
    """A reference must point into the schema itself, and to something that is there."""
    reference = node.get("$ref")
    if not isinstance(reference, str):  # also a property that is named $ref
        return
    if not reference.startswith("#"):
        raise _invalid(f"may refer only to its own parts, not to {reference[:100]!r}")
    if not reference.startswith("#/"):
        return  # the root, or an anchor
    target: Any = schema
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        else:
            raise _invalid(f"refers to {reference[:100]!r}, which is not in it")


def _invalid(problem: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_schema", "{problem}", {"problem": problem})
