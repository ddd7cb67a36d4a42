"""Checks in a helper process whether a finished answer obeys its schema.

RE2 matches the patterns, in time linear in the answer's length for any pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import re2

from contract.ecma_regex import BadPattern
from contract.patterns import read_pattern
from engine.dash.answer_check import make_check

#: Each may have megabytes, so that a tenant's 16 do not fill the process.
_NUM_KEPT = 16
_MEMORY_BYTES = 32 << 20


def set_up() -> Callable[[str, str], str | None]:
    """Make a function (schema, answer), both JSON -> what is wrong with the answer, or None."""
    return make_check(_is_found)


@functools.lru_cache(_NUM_KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    try:
        return re2.compile(read_pattern(pattern).search, options)
    except BadPattern:
        return None  # the linter reports that such a pattern is not checked


def _is_found(pattern: str, text: str) -> bool | None:
    expression = _compiled(pattern)
    # Half a character, which JSON can escape, is no text that RE2 takes.
    text = text.encode("utf-8", "replace").decode()
    return None if expression is None else expression.search(text) is not None
