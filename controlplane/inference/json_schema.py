"""Bounds on a schema that a request's answer must obey, before anything compiles it."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic_core import PydanticCustomError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
#: How far `_Endless` looks; a schema that needs more is taken to have an end.
MAX_HOPS, MAX_VISITS = 100, 10_000


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
    if _Endless(schema).is_endless(schema, (id(schema),)):
        raise _invalid("requires itself without end, so no answer can ever satisfy it")
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
    if reference.startswith("#/"):  # else the root, or an anchor
        _target(reference, schema)


def _target(reference: str, schema: dict[str, Any]) -> Any:
    """What a reference #/… points to. Raises PydanticCustomError when it is not there."""
    target: Any = schema
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and step in target:
            target = target[step]
        elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        else:
            raise _invalid(f"refers to {reference[:100]!r}, which is not in it")
    return target


class _Endless:
    """Whether a schema requires itself over and over, so that only an infinite value satisfies it.

    Says so only when certain: `is_endless` follows what every instance must contain, and a
    reference back to a schema that is being followed has no end.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._finite: set[int] = set()
        self._num_visits = 0

    def is_endless(self, node: Any, followed: tuple[int, ...]) -> bool:
        self._num_visits += 1
        if not isinstance(node, dict) or id(node) in self._finite:
            return False
        if self._num_visits > MAX_VISITS or len(followed) > MAX_HOPS:
            return False
        must, choices = self._parts(node)
        is_endless = self._reference_is_endless(node, followed) or any(
            self.is_endless(part, followed) for part in must
        )
        is_endless = is_endless or any(
            all(self.is_endless(part, followed) for part in choice) for choice in choices
        )
        if not is_endless:
            self._finite.add(id(node))
        return is_endless

    def _reference_is_endless(self, node: dict[str, Any], followed: tuple[int, ...]) -> bool:
        reference = node.get("$ref")
        if reference == "#":
            target: Any = self._schema
        elif isinstance(reference, str) and reference.startswith("#/"):
            target = _target(reference, self._schema)
        else:
            return False
        return id(target) in followed or self.is_endless(target, (*followed, id(target)))

    @staticmethod
    def _parts(node: dict[str, Any]) -> tuple[list[Any], list[list[Any]]]:
        """The schemas that something in every instance obeys, and the sets of which one is."""
        must = list(node.get("allOf", ()))
        choices = [node[name] for name in ("anyOf", "oneOf") if name in node]
        if node.get("type") == "object":
            properties = node.get("properties", {})
            must += [properties[name] for name in node.get("required", ()) if name in properties]
        if node.get("type") == "array" and node.get("minItems", 0) > 0:
            first = node.get("prefixItems", ())
            must += first[: int(node["minItems"])]
            if len(first) < node["minItems"]:
                must.append(node.get("items"))
        return must, choices


def _invalid(problem: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_schema", "{problem}", {"problem": problem})
