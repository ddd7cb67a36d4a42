"""Checks in a helper process whether finished answers obey their schemas, one by one."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable

import re2

from engine.dash.answer_check import compiled, make_check


def set_up() -> Callable[[str, str], str | None]:
    """Make a function (schema, answer), both JSON -> what is wrong with the answer, or None.

    It keeps nothing of an answer for the next one, which may be another tenant's: else the time of
    that would tell of this one.
    """
    check = make_check()

    def check_alone(schema: str, answer: str) -> str | None:
        compiled.cache_clear()
        re2.purge()
        re.purge()  # drops the format regex, which jsonschema compiles
        urllib.parse.clear_cache()  # type: ignore[attr-defined]  # drops references
        return check(schema, answer)

    return check_alone
