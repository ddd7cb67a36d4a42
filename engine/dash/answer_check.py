"""Checks with `jsonschema` whether a finished answer obeys its schema.

Numbers are decimals here: 0.3 is a multiple of 0.1, and 1e999999999 costs no more than 1. If a name
occurs twice in an object, the last one counts, as for any JSON parser.

This module is imported when the first answer is checked: nothing else in the engine needs
`jsonschema`, which comes with Outlines. No torch here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY

from contract import formats
from contract.exact_numbers import is_integer, is_multiple, read_decimal

MAX_MESSAGE_CHARS = 300
_NUM_KEPT = 256

#: (pattern, text) -> whether the pattern matches somewhere in the text; None: it is not known.
Search = Callable[[str, str], bool | None]
Check = Callable[[str, str], str | None]


def make_check(search: Search) -> Check:
    """Make a function (schema, answer), both JSON text -> where and how the answer fails, or None.

    The function raises RecursionError if either is nested too deeply.
    """
    base = jsonschema.Draft202012Validator
    checker = jsonschema.FormatChecker(formats=tuple(base.FORMAT_CHECKER.checkers))
    for name, is_valid in formats.CHECKS.items():
        checker.checks(name)(functools.partial(_has_format, is_valid))
    kind = jsonschema.validators.extend(
        base,
        {
            "pattern": functools.partial(_pattern, search),
            "patternProperties": functools.partial(_pattern_properties, search),
            "additionalProperties": functools.partial(_additional_properties, search),
            "multipleOf": _multiple_of,
            "unevaluatedProperties": _unevaluated_properties,
            "$dynamicRef": _unchecked,
        },
        type_checker=base.TYPE_CHECKER.redefine("integer", lambda _, value: is_integer(value)),
    )

    @functools.lru_cache(_NUM_KEPT)
    def validator(schema: str) -> Any:
        parsed = json.loads(schema, parse_float=read_decimal)
        # A registry of its own: jsonschema's would fetch the URL of a reference from the network.
        return kind(parsed, format_checker=checker, registry=REGISTRY)

    def check(schema: str, answer: str) -> str | None:
        try:
            value = json.loads(answer, parse_float=read_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is not JSON: {error}"[:MAX_MESSAGE_CHARS]
        found = next(validator(schema).iter_errors(value), None)
        return None if found is None else _message(found)

    return check


@functools.cache
def _decoders_check() -> Check:
    """Make the check of an answer whose patterns the decoder enforced: they count as matched."""
    return make_check(lambda pattern, text: None)


def schema_error(schema: str, text: str) -> str | None:
    """Return how a text that was generated under a schema violates it; None: it does not.

    schema, text  both JSON; patterns are not checked again
    """
    try:
        return _decoders_check()(schema, text)
    except RecursionError:
        return "it is nested too deeply to be checked"
    except Exception as error:  # a schema that the decoder accepts and jsonschema does not
        return f"it cannot be checked: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _message(error: Any) -> str:
    where = "/".join(str(step) for step in error.absolute_path)
    message = f"at /{where}: {error.message}"[:MAX_MESSAGE_CHARS]
    # A name in the answer may be half a surrogate pair, which UTF-8 cannot encode.
    return message.encode("utf-8", "replace").decode()


def _pattern(
    search: Search, validator: Any, value: str, instance: Any, schema: Any
) -> Iterator[Any]:
    if isinstance(instance, str) and search(value, instance) is False:
        yield jsonschema.ValidationError(f"no match of {value!r} in {instance!r}")


def _pattern_properties(
    search: Search, validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for expression, part in value.items():
        for name, item in instance.items():
            if search(expression, name) is True:
                yield from validator.descend(item, part, path=name, schema_path=expression)


def _additional_properties(
    search: Search, validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in instance.items():
        if name not in known and all(search(each, name) is False for each in expressions):
            yield from validator.descend(item, value, path=name)


def _unevaluated_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    """Check it as `jsonschema` does, which reads patterns beside it as Python's."""
    found = jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"]
    with contextlib.suppress(re.error):
        yield from found(validator, value, instance, schema)


def _has_format(is_valid: Callable[[str], bool], value: Any) -> bool:
    return not isinstance(value, str) or is_valid(value)


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Accept anything: the linter reports that the keyword is not checked."""
    yield from ()


def _multiple_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number") and not is_multiple(instance, value):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {value}")
