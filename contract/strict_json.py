"""Parse untrusted JSON strictly: no name twice, no NaN, no number out of range."""

from __future__ import annotations

import json
import math
from typing import Any

from contract.adapter_problems import shown

#: Of values that a chat template writes: it calls itself for each level.
MAX_DEPTH = 64


def read_object(text: bytes) -> dict[str, Any]:
    """Parse an object in UTF-8. Raises ValueError that says what is wrong with the text."""
    try:
        found = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
    except _NamedTwice as error:
        raise ValueError("names something twice") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"is not JSON: {shown(str(error))}") from error
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for node in level
            if isinstance(node, dict | list)
            for inner in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


class _NamedTwice(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _NamedTwice
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
