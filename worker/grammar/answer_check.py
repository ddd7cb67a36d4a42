"""Checks in a helper process whether a finished answer obeys its schema.

RE2 matches the patterns, in time linear in the answer's length for any pattern.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Callable
from typing import Any

import re2

from contract.patterns import BadPattern, read_pattern
from engine.dash.answer_check import make_check

_NUM_KEPT = 256


def set_up() -> Callable[[str, str], str | None]:
    """Make a function (schema, answer), both JSON -> what is wrong with the answer, or None.

    It keeps nothing of an answer for the next one, which may be another tenant's: else the time of
    that would tell of this one.
    """
    check = make_check(_is_found)

    def check_alone(schema: str, answer: str) -> str | None:
        _compiled.cache_clear()
        re2.purge()
        re.purge()  # of the format regex, which jsonschema compiles
        urllib.parse.clear_cache()  # type: ignore[attr-defined]  # of references
        return check(schema, answer)

    return check_alone


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
