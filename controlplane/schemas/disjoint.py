"""Decide whether two schemas share no value; "disjoint" only when that is certain."""

from __future__ import annotations

import itertools
from typing import Any

from controlplane.schemas.same import is_same, values_of
from controlplane.schemas.walker import Walk

MAX_BRANCHES, MAX_DEPTH = 64, 4
_BOUNDS = (
    ("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)  # fmt: skip
#: Bounds -> the type to which they apply.
_BOUND_TYPES = ("number", "string", "array", "object")


class Disjointness:
    """A comparison of the schemas of one walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def overlap(self, branches: list[Any], known: dict[str, Any]) -> tuple[int, int] | None:
        """Return the first two of `branches` that may share a value, or None.

        known  keywords that also apply to the value
        """
        if len(branches) > MAX_BRANCHES:
            return 0, 1
        of_all: dict[str, Any] = {
            key: known[key] for key in ("type", "properties", "required") if key in known
        }
        wholes = [self._with(of_all, self._walk.resolve(branch)) for branch in branches]
        for (i, one), (j, other) in itertools.combinations(enumerate(wholes), 2):
            if not self.are_disjoint(one, other, MAX_DEPTH):
                return i, j
        return None

    @staticmethod
    def _with(of_all: dict[str, Any], branch: Any) -> Any:
        """Return a branch, completed with the common keywords that it lacks."""
        if not isinstance(branch, dict):
            return branch
        merged = of_all | branch
        merged["required"] = [*of_all.get("required", ()), *branch.get("required", ())]
        return merged

    def are_disjoint(self, one: Any, other: Any, depth: int) -> bool:
        one, other = self._walk.resolve(one), self._walk.resolve(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth == 0:
            return False
        types = _types(one) & _types(other)
        if not types:
            return True
        mine, its = values_of(one), values_of(other)
        if mine is not None and its is not None:
            return not any(is_same(a, b) for a in mine for b in its)
        for kind, bounds in zip(_BOUND_TYPES, _BOUNDS, strict=True):
            if types <= {kind, "integer"} and _are_apart(one, other, *bounds):
                return True
        return types == {"object"} and (
            self._differ_in_a_property(one, other, depth)
            or _lacks_what_is_needed(one, other)
            or _lacks_what_is_needed(other, one)
        )

    def _differ_in_a_property(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        mine, its = one.get("properties", {}), other.get("properties", {})
        needed = {*one.get("required", ()), *other.get("required", ())}
        return any(
            self.are_disjoint(mine[name], its[name], depth - 1)
            for name in needed
            if name in mine and name in its
        )


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of a schema's values; integers count as numbers."""
    types = schema.get("type")
    if types is None:
        values = values_of(schema)
        if values is None:
            return {"null", "boolean", "object", "array", "number", "string", "integer"}
        return set().union(*map(_types_of_value, values))
    names = {types} if isinstance(types, str) else set(types)
    return names | {"integer"} if "number" in names else names


def _types_of_value(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _are_apart(one: dict[str, Any], other: dict[str, Any], low: str, high: str) -> bool:
    for a, b in ((one, other), (other, one)):
        if low in a and high in b and a[low] > b[high]:
            return True
    return False


def _lacks_what_is_needed(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `one` requires a property that `other` forbids."""
    if other.get("patternProperties") or other.get("additionalProperties") is not False:
        return False
    allowed = other.get("properties", {})
    return any(allowed.get(name, False) is False for name in one.get("required", ()))
