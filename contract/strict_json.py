"""Parse untrusted JSON strictly: no name twice, no NaN, no number out of range.

It imports nothing of ours: the command line has this file, too (a link in `cli/lorikeet_cli`).
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

#: Deepest nesting of values for a chat template, which calls itself for each level.
MAX_DEPTH = 64


_MAX_SHOWN = 120
_BLANKS = re.compile(r"[ \t\r\n]*")


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
    return _parsed(_DECODER.decode, text)


def read_array(text: str) -> Iterator[Any]:
    """Yield the items of an array one by one. Raises ValueError when it reaches what is wrong."""
    at = _after_blanks(text, 0)
    if text[at : at + 1] != "[":
        raise ValueError("is not a JSON array")
    is_first = True
    while True:
        at = _after_blanks(text, at + 1)
        if is_first and text[at : at + 1] == "]":
            break
        is_first = False
        item, at = _parsed(_DECODER.raw_decode, text, at)
        yield item
        at = _after_blanks(text, at)
        if text[at : at + 1] != ",":
            break
    if text[at : at + 1] != "]" or text[at + 1 :].strip():
        raise ValueError("is not JSON: an array does not end correctly")


def _after_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found else at


def _parsed(parse: Callable[..., Any], *given: Any) -> Any:
    try:
        return parse(*given)
    except _NotStrict as error:
        raise ValueError(*error.args) from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:  # also an integer of thousands of digits
        raise ValueError(f"is not JSON: {_shown(str(error))}") from error


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects lie in each other more than MAX_DEPTH deep."""
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
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, times in counts.items() if times > 1)
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


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
)
