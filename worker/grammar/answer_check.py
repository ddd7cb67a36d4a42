"""Whether a finished answer obeys its schema; runs in a helper process.

Patterns are RE2's, linear in the answer's length whoever wrote them.
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
    """-> (schema, answer), both as JSON text -> where and how the answer fails, None if it does
    not."""
    return make_check(_is_found)


@functools.lru_cache(_NUM_KEPT)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(read_pattern(pattern).search, options)
    except (BadPattern, re2.error):
        return None  # the linter has said that nothing looks at it


def _is_found(pattern: str, text: str) -> bool:
    expression = _compiled(pattern)
    return expression is None or expression.search(text) is not None
