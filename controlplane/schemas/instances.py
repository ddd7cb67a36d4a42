"""The schemas of the decoder that apply to one object, and their rules for its names.

The decoder merges the schemas that apply to the same value: those of `allOf`, `anyOf` and `$ref`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contract.schemas.patterns import other_than
from controlplane.schemas.name_patterns import NamePatterns

Schema = dict[str, Any]
_ABOUT_NAMES = ("properties", "patternProperties", "additionalProperties", "required")


class Instances:
    """The parts of a decoder's schema, grouped by the values to which they apply."""

    def __init__(self, decoding: Schema) -> None:
        self._definitions = decoding.get("$defs", {})
        self._groups: list[list[Schema]] = []
        self._grouped: set[int] = set()
        todo: list[Any] = [decoding]
        while todo:
            start = todo.pop()
            if isinstance(start, dict) and id(start) not in self._grouped:
                self._grouped.add(id(start))
                group: list[Schema] = []
                self._collect(start, group)
                self._groups.append([each for each in group if _is_about_names(each)])
                todo += [part for each in group for part in _parts(each)]

    def _collect(self, schema: Any, group: list[Schema]) -> None:
        """Add a schema, and those that apply to the same value, to a group."""
        if not isinstance(schema, dict) or any(schema is each for each in group):
            return
        group.append(schema)
        for part in [*schema.get("allOf", ()), *schema.get("anyOf", ())]:
            self._collect(part, group)
        if "$ref" in schema:
            self._collect(self._definitions[schema["$ref"].rpartition("/")[2]], group)

    def have_overlapping_patterns(self) -> bool:
        """Return whether a name may match patterns of two schemas of one object."""
        patterns = NamePatterns()
        return any(
            patterns.overlapping(list(dict.fromkeys(_patterns(group)))) is not None
            for group in self._groups
            if sum(bool(each.get("patternProperties")) for each in group) > 1
        )

    def close_names(self) -> None:
        r"""Write the other names of objects as a pattern, where one schema alone lists names.

        Else the decoder would take the name "\u0061" for another one than "a".
        """
        shared = {id(each) for group in self._groups if len(group) > 1 for each in group}
        for group in self._groups:
            if len(group) == 1 and id(group[0]) not in shared:
                _close_names(group[0])


def _close_names(schema: Schema) -> None:
    listed, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    names = dict.fromkeys([*listed, *schema.get("required", ())])
    if not names or others is False or "patternProperties" in schema or "maxProperties" in schema:
        return
    schema["properties"] = {name: listed.get(name, others) for name in names}
    schema["patternProperties"] = {f"^{other_than(list(names))}$": others}
    schema["additionalProperties"] = False


def _is_about_names(schema: Schema) -> bool:
    return any(keyword in schema for keyword in _ABOUT_NAMES)


def _patterns(group: list[Schema]) -> Iterator[str]:
    for schema in group:
        yield from schema.get("patternProperties", ())


def _parts(schema: Schema) -> Iterator[Any]:
    """Yield the schemas of the values inside a value."""
    for keyword in ("properties", "patternProperties"):
        yield from schema.get(keyword, {}).values()
    yield from schema.get("prefixItems", ())
    yield schema.get("items")
    yield schema.get("additionalProperties")
