"""The keywords of a schema that contain schemas (JSON Schema 2020-12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from controlplane.schemas.pointers import join

#: Keywords whose value is a schema, a list of schemas, or an object of schemas.
ONE = frozenset(
    {
        "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
OBJECTS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
#: Keywords whose schemas apply to the value itself, and so may evaluate its items and properties.
IN_PLACE = frozenset(
    {"$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "oneOf", "then"}
)


def children(node: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, with their pointers."""
    for key, value in node.items():
        if key in ONE:
            yield join(at, key), value
        elif key in LISTS and isinstance(value, list):
            for i, item in enumerate(value):
                yield join(at, key, i), item
        elif key in OBJECTS and isinstance(value, dict):
            for name, item in value.items():
                yield join(at, key, name), item


def property_names(schema: Any) -> set[str]:
    """Return the names of the properties that a schema lists anywhere."""
    names: set[str] = set()
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            todo += node.values()
            lists = [node.get("required"), node.get("properties"), node.get("dependentSchemas")]
            needed = node.get("dependentRequired")
            if isinstance(needed, dict):
                lists += [needed, *needed.values()]
            for each in lists:
                if isinstance(each, dict | list):
                    names.update(name for name in each if isinstance(name, str))
    return names
