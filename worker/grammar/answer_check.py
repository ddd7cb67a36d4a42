"""Checks in a helper process whether a finished answer obeys its schema.

RE2 matches the patterns, in time linear in the answer's length for any pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import re2

from contract.patterns import BadPattern, read_pattern
from engine.dash.answer_check import make_check

_NUM_KEPT = 256


def set_up() -> Callable[[str, str], str | None]:
    """Make a function (schema, answer), both JSON -> what is wrong with the answer, or None."""
    return make_check(_is_found)


@functools.lru_cache(_NUM_KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(read_pattern(pattern).search, options)
    except (BadPattern, re2.error):
        return None  # the linter reports that such a pattern is not checked


def _is_found(pattern: str, text: str) -> bool:
    expression = _compiled(pattern)
    return expression is None or expression.search(text) is not None
