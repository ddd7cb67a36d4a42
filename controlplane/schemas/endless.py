"""Find schemas that only an infinite value satisfies."""

from __future__ import annotations

from typing import Any

from controlplane.schemas.findings import BadSchema
from controlplane.schemas.pointers import References

#: Number of steps of `requires_itself`; a schema that needs more counts as finite.
MAX_HOPS, MAX_VISITS = 100, 10_000


def requires_itself(schema: dict[str, Any]) -> bool:
    """Return whether a schema requires itself without end; True only when certain."""
    return _Endless(schema).is_endless(schema, (id(schema),))


class _Endless:
    """A walk over the required parts of instances; a reference to its own path is endless."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._references = References(schema)
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
        if not isinstance(reference, str):
            return False
        try:
            target = self._references.target(self._references.pointer(reference, ""))
        except BadSchema:
            return False
        return id(target) in followed or self.is_endless(target, (*followed, id(target)))

    @staticmethod
    def _parts(node: dict[str, Any]) -> tuple[list[Any], list[list[Any]]]:
        """Return the schemas that a part of every instance obeys, and the lists of alternatives."""
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
