"""Parse untrusted JSON strictly: no name twice, no NaN, no number out of range.

It imports nothing of ours: the command line has this file, too (a link in `cli/lorikeet_cli`).
"""

from __future__ import annotations

import json
import math
from typing import Any

#: Of values that a chat template writes: it calls itself for each level.
MAX_DEPTH = 64


_MAX_SHOWN = 120


def read_object(text: bytes) -> dict[str, Any]:
    """Parse an object in UTF-8. Raises ValueError that says what is wrong with the text."""
    try:
        found = read_value(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError("is not JSON, which is text in UTF-8") from error
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def read_value(text: str) -> Any:
    """Parse any value. Raises ValueError that says what is wrong with the text."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
        )
    except _NotStrict as error:
        raise ValueError(*error.args) from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:  # also an integer of thousands of digits
        raise ValueError(f"is not JSON: {_shown(str(error))}") from error


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


class _NotStrict(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _NotStrict(f"has the key {_shown(twice)} twice in one object")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _NotStrict(f"has the number {_shown(text)}, which is out of range")
    return number


def _no_constant(name: str) -> None:
    raise _NotStrict(f"has {name}, which is not JSON")


def _shown(text: str) -> str:
    return text[:_MAX_SHOWN].encode("unicode_escape").decode("ascii")
