"""Refuse numbers that JSON does not have: parsers accept `NaN`, and read `1e999` as infinity.

Every body is checked first: such a number in a schema, or in another field of free form, would make
the job that contains it invalid JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pydantic_core

from controlplane.errors import InvalidRequest

#: Maps a digit to 0, the letter of an exponent to e, all else to a blank.
_SHAPE = bytes(
    ord("0") if chr(byte).isdigit() and byte < 128 else ord("e") if byte in b"eE" else ord(" ")
    for byte in range(256)
)
#: A number beyond a double's 309 digits has an exponent of three digits, or 200 digits in a row.
_LARGE = (b"0e000", b"0" * 200)


def check_body(body: bytes) -> None:
    """Raise InvalidRequest for a body with such a number. A body that is not JSON passes."""
    if not _may_have_one(body):
        return
    try:
        value = pydantic_core.from_json(body)
    except ValueError:
        return  # the next parser says what is wrong
    check_value(value)


def check_value(value: Any) -> None:
    """Raise InvalidRequest that names the place of the first such number in a parsed body."""
    place = _place_of_first(value)
    if place is not None:
        name = ".".join(map(str, place))[:200]
        raise InvalidRequest(
            f"Invalid value for '{name or 'the body'}': JSON has no NaN and no infinite numbers.",
            param=name or None,
            code="invalid_value",
        )


def _may_have_one(body: bytes) -> bool:
    """Return whether a body must be parsed for this check; most need not be."""
    if b"NaN" in body or b"Infinity" in body:
        return True
    shape = body.translate(_SHAPE, b"+")
    return any(large in shape for large in _LARGE)


def _place_of_first(value: Any) -> tuple[Any, ...] | None:
    """Return the keys and indices of the first one; None when all numbers are finite."""
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
