"""Say what is wrong with a value in our own words: pydantic's name types of Python."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

#: pydantic's type -> its name in messages.
_NOUNS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_QUOTED = "without quotes"
_NUMBERS = ("an integer", "a number")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?", re.ASCII)
_BOUNDS = {
    "greater_than_equal": "must be {ge} or more",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be {le} or less",
    "less_than": "must be less than {lt}",
    "string_too_long": "must have {max_length} characters or less",
    "string_too_short": "must have {min_length} characters or more",
    "too_long": "must have {max_length} entries or less",
    "too_short": "must have {min_length} entries or more",
    "string_pattern_mismatch": "must match {pattern}",
    "int_parsing_size": "is too large",
}


def is_other(detail: ErrorDetails) -> bool:
    """Return whether the value is not of one type or list of values; a union may have others."""
    return detail["type"] in _NOUNS or detail["type"] == "literal_error"


def words_of(detail: ErrorDetails) -> str:
    """Return the message of a validator of ours, which pydantic begins with words of its own."""
    return detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")


def said(detail: ErrorDetails, others: Sequence[ErrorDetails]) -> str:
    """Say what is wrong.

    others  faults at the same place, one for each other type that is allowed there
    """
    alternatives = _alternatives((detail, *others))
    if is_other(detail):
        # Some text may stand there, or the text is a number in quotes.
        is_told = isinstance(detail["input"], str) and (
            "'" in alternatives or _QUOTED in alternatives
        )
        return f"must be {alternatives}{'' if is_told else _not(detail['input'])}"
    words = _BOUNDS.get(detail["type"])
    try:
        if words is not None:
            # What has the right type is out of bounds; only a value by name is another way.
            literals = _alternatives([each for each in others if each["type"] == "literal_error"])
            more = f", or {literals}" if literals else ""
            bounds = {name: _plain(value) for name, value in detail.get("ctx", {}).items()}
            return words.format(**bounds).replace(" 1 characters", " 1 character") + more
    except KeyError:
        pass  # our own error under one of these names
    return words_of(detail).replace("Input should be", "must be")


def _alternatives(details: Sequence[ErrorDetails]) -> str:
    """Return what may stand there: `a number or 'auto'`."""
    nouns = [_noun(each) for each in details if each["type"] in _NOUNS]
    values = [each["ctx"]["expected"] for each in details if each["type"] == "literal_error"]
    return " or ".join(dict.fromkeys(nouns + values))


def _plain(bound: Any) -> Any:
    return f"{bound:g}" if isinstance(bound, float) else bound


def _noun(detail: ErrorDetails) -> str:
    noun, value = _NOUNS[detail["type"]], detail["input"]
    is_quoted = isinstance(value, str) and _NUMBER.fullmatch(value) is not None
    return f"{noun} {_QUOTED}" if is_quoted and noun in _NUMBERS else noun


def _not(value: Any) -> str:
    """Say what stands there instead, but for the words of a text."""
    if value is None or isinstance(value, bool | int | float):
        return f", not {json.dumps(value)[:40]}"
    for kind, noun in ((str, "a string"), (list, "a list"), (dict, "an object")):
        if isinstance(value, kind):
            return f", not {noun}"
    return ""
