"""Checks with `jsonschema` whether a finished answer obeys its schema.

Numbers are decimals here: 0.3 is a multiple of 0.1, and 1e999999999 costs no more than 1. If a name
occurs twice in an object, the last one counts, as for any JSON parser.

This module is imported when the first answer is checked: nothing else in the engine needs
`jsonschema`, which comes with Outlines. No torch here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema
from jsonschema_specifications import REGISTRY

MAX_MESSAGE_CHARS = 300
#: Larger than any exponent that a schema can compare with, and small enough for a Decimal.
_HUGE_EXPONENT = 10**17

#: (pattern, text) -> whether the pattern matches somewhere in the text, or may match.
Search = Callable[[str, str], bool]
Check = Callable[[str, str], str | None]


def make_check(search: Search) -> Check:
    """Make a function (schema, answer), both JSON text -> where and how the answer fails, or None.

    The function raises RecursionError if either is nested too deeply.
    """
    base = jsonschema.Draft202012Validator
    kind = jsonschema.validators.extend(
        base,
        {
            "pattern": functools.partial(_pattern, search),
            "patternProperties": functools.partial(_pattern_properties, search),
            "additionalProperties": functools.partial(_additional_properties, search),
            "multipleOf": _multiple_of,
            "$dynamicRef": _unchecked,
        },
    )

    def validator(schema: str) -> Any:
        parsed = json.loads(schema, parse_float=Decimal)
        # A registry of its own: jsonschema's would fetch the URL of a reference from the network.
        return kind(parsed, format_checker=base.FORMAT_CHECKER, registry=REGISTRY)

    def check(schema: str, answer: str) -> str | None:
        try:
            value = json.loads(answer, parse_float=_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is not JSON: {error}"[:MAX_MESSAGE_CHARS]
        found = next(validator(schema).iter_errors(value), None)
        return None if found is None else _message(found)

    return check


@functools.cache
def _decoders_check() -> Check:
    """Make the check of an answer whose patterns the decoder enforced: they count as matched."""
    return make_check(lambda pattern, text: True)


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


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # the exponent is too large for a Decimal: any as large will do
        number, _, exponent = text.lower().partition("e")
        sign = "-" if exponent.startswith("-") else ""
        return Decimal(f"{number}e{sign}{_HUGE_EXPONENT}")


def _message(error: Any) -> str:
    where = "/".join(str(step) for step in error.absolute_path)
    message = f"at /{where}: {error.message}"[:MAX_MESSAGE_CHARS]
    # A name in the answer may be half a surrogate pair, which UTF-8 cannot encode.
    return message.encode("utf-8", "replace").decode()


def _pattern(
    search: Search, validator: Any, value: str, instance: Any, schema: Any
) -> Iterator[Any]:
    if isinstance(instance, str) and not search(value, instance):
        yield jsonschema.ValidationError(f"no match of {value!r} in {instance!r}")


def _pattern_properties(
    search: Search, validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for expression, part in value.items():
        for name, item in instance.items():
            if search(expression, name):
                yield from validator.descend(item, part, path=name, schema_path=expression)


def _additional_properties(
    search: Search, validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in instance.items():
        if name not in known and not any(search(each, name) for each in expressions):
            yield from validator.descend(item, value, path=name)


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Accept anything: the linter reports that the keyword is not checked."""
    yield from ()


def _multiple_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number") and not _is_multiple(instance, value):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {value}")


def _is_multiple(number: int | Decimal, step: int | Decimal) -> bool:
    """Whether it is an exact multiple, for any digits; Decimal's `%` fails after 28 digits."""
    units, exponent, num_digits = _units(number)
    step_units, step_exponent, _ = _units(step)
    shift = exponent - step_exponent
    if shift >= 0:
        return units * pow(10, shift, step_units) % step_units == 0
    return units == 0 or (-shift <= num_digits and units % (step_units * 10**-shift) == 0)


def _units(number: int | Decimal) -> tuple[int, int, int]:
    """Return (units, exponent, digits of units): the number is ± units * 10**exponent."""
    _, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)  # JSON has finite numbers only
    return int(Decimal((0, digits, 0))), exponent, len(digits)
