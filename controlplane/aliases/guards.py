"""Read a guard, which says when a canary is rolled back, from JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from controlplane.aliases.verdict import BOUNDS, MEASURES, Guard
from controlplane.errors import InvalidRequest

_MAY_BE_NONE = {measure.guard_field for measure in MEASURES}


def guard_read(stored: Mapping[str, Any]) -> Guard:
    """Return the guard of a revision; what is not stored has its default."""
    return Guard(**stored)


def guard_parse(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a guard as it is stored: what is not the default. Raises InvalidRequest."""
    known = {field.name: field.default for field in dataclasses.fields(Guard)}
    stored = {}
    for name, value in body.items():
        if name not in known:
            raise InvalidRequest("There is no such field: remove it.", param=f"guard.{name[:100]}")
        checked = _checked(name, value)
        if checked != known[name]:
            stored[name] = checked
    return stored


def _checked(name: str, value: Any) -> Any:
    param = f"guard.{name}"
    if name == "is_on":
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} is true or false.", param=param)
        return value
    if value is None and name in _MAY_BE_NONE:
        return None
    least, most = BOUNDS[name]
    kind: type = int if name == "min_requests" else float
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or kind(value) != value:
        or_null = ", or null" if name in _MAY_BE_NONE else ""
        raise InvalidRequest(
            f"{name} is a number from {least:g} to {most:g}{or_null}.", param=param
        )
    return kind(value)
