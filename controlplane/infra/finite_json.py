"""JSON has no NaN and no infinite number, though parsers take `NaN` and make infinity of `1e999`.

Every body is looked at before anything else sees it: such a number in a schema, or wherever else a
body is free in its form, would be written into a job as something that is no JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pydantic_core

from controlplane.errors import InvalidRequest

#: A digit is 0, an exponent's letter e, all else a blank.
_SHAPE = bytes(
    ord("0") if chr(byte).isdigit() and byte < 128 else ord("e") if byte in b"eE" else ord(" ")
    for byte in range(256)
)
#: Of numbers beyond a double's 309 digits: three digits of an exponent, or what two cannot reach.
_LARGE = (b"0e000", b"0" * 200)


def check_body(body: bytes) -> None:
    """Raise InvalidRequest for a body that has such a number. What is no JSON at all passes."""
    if not _may_have_one(body):
        return
    try:
        value = pydantic_core.from_json(body)
    except ValueError:
        return  # whoever parses it next says what is wrong
    check_value(value)


def check_value(value: Any) -> None:
    """Raise InvalidRequest naming the place of the first such number in a body that was parsed."""
    place = _place_of_first(value)
    if place is not None:
        name = ".".join(map(str, place))[:200]
        raise InvalidRequest(
            f"Invalid value for '{name or 'the body'}': JSON has no NaN and no infinite numbers.",
            param=name or None,
            code="invalid_value",
        )


def _may_have_one(body: bytes) -> bool:
    """Few bodies do; the others are not parsed for this."""
    if b"NaN" in body or b"Infinity" in body:
        return True
    shape = body.translate(_SHAPE, b"+")
    return any(large in shape for large in _LARGE)


def _place_of_first(value: Any) -> tuple[Any, ...] | None:
    """The keys and indices on the way to it; None when all numbers are finite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else ()
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for step, inner in items:
        if isinstance(inner, float | dict | list):
            place = _place_of_first(inner)
            if place is not None:
                return (step, *place)
    return None
