"""JSON pointers (RFC 6901) into a schema, and the targets of its references."""

from __future__ import annotations

import functools
from typing import Any

from controlplane.schemas.findings import BadSchema


def join(pointer: str, *steps: str | int) -> str:
    return pointer + "".join(
        "/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps
    )


class References:
    """The parts of one schema that its references name."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def pointer(self, reference: str, at: str) -> str:
        """Return the pointer that a `$ref` at `at` means.

        Raises BadSchema unless it is a schema inside this one.
        """
        if not reference.startswith("#"):
            raise BadSchema(f"can refer only to its own parts, not to {reference[:100]!r}", at)
        if reference == "#":
            return ""
        if reference.startswith("#/"):
            self.target(reference[1:], at)
            return reference[1:]
        if reference[1:] not in self._anchors:
            raise BadSchema(f"refers to {reference[:100]!r}, which is not in it", at)
        return self._anchors[reference[1:]]

    def target(self, pointer: str, at: str = "") -> dict[str, Any] | bool:
        """Return the schema at `pointer`. Raises BadSchema."""
        target: Any = self._schema
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise BadSchema(f"refers to '#{pointer[:100]}', which is not in it", at)
        if not isinstance(target, dict | bool):
            raise BadSchema(f"refers to '#{pointer[:100]}', which is not a schema", at)
        return target

    @functools.cached_property
    def _anchors(self) -> dict[str, str]:
        """Map each `$anchor` to its part's pointer."""
        found: dict[str, str] = {}
        todo: list[tuple[str, Any]] = [("", self._schema)]
        while todo:
            pointer, node = todo.pop()
            if isinstance(node, dict):
                if isinstance(name := node.get("$anchor"), str):
                    found.setdefault(name, pointer)
                todo += [(join(pointer, key), value) for key, value in node.items()]
            elif isinstance(node, list):
                todo += [(join(pointer, i), value) for i, value in enumerate(node)]
        return found
