"""Say what is wrong with a value in our own words: pydantic's name types of Python."""

from __future__ import annotations

from collections.abc import Sequence

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
    "literal_error": "must be {expected}",
    "int_parsing_size": "is too large",
}


def is_of_type(detail: ErrorDetails) -> bool:
    """Whether the fault is only that the value has the wrong type."""
    return detail["type"] in _NOUNS


def said(detail: ErrorDetails, others: Sequence[ErrorDetails]) -> str:
    """Say what is wrong.

    others  faults at the same place, one for each other type that is allowed there
    """
    if is_of_type(detail):
        nouns = dict.fromkeys(
            _NOUNS[each["type"]] for each in (detail, *others) if is_of_type(each)
        )
        return f"must be {' or '.join(nouns)}"
    words = _BOUNDS.get(detail["type"])
    try:
        if words is not None:
            return words.format(**detail.get("ctx", {}))
    except KeyError:
        pass  # our own error under one of these names
    return detail["msg"].replace("Input should be", "must be")
