"""What is wrong with a value, in words of our own: those of the library that checks it are its
readers', who know its types."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import ErrorDetails

#: What it had to be -> how that is called.
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
    """Whether the value is of another type than it had to be: the least that can be said."""
    return detail["type"] in _NOUNS


def said(detail: ErrorDetails, others: Sequence[ErrorDetails]) -> str:
    """What is wrong.

    others  found at the same place, each by another reading of what may stand there
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
