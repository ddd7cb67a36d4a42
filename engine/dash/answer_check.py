"""Whether a finished answer obeys its schema, by `jsonschema`.

Numbers are decimals here: 0.3 is a multiple of 0.1, and 1e999999999 costs no more than 1. What is
said twice under one name counts once, as it does to whoever parses the answer.

Imported when the first answer is checked: nothing else of the engine needs `jsonschema`, which
Outlines brings. No torch here.
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
_NUM_KEPT = 256
#: Beyond all that a schema can compare with, and within what a Decimal holds.
_HUGE_EXPONENT = 10**17

#: (pattern, text) -> whether the pattern is found in the text, or may be.
Search = Callable[[str, str], bool]
Check = Callable[[str, str], str | None]


def make_check(search: Search) -> Check:
    """-> (schema, answer), both as JSON text -> where and how the answer fails, None if it does
    not. Raises RecursionError for what is nested too deeply."""
    base = jsonschema.Draft202012Validator
    kind = jsonschema.validators.extend(
        base,
        {
            "pattern": functools.partial(_pattern, search),
            "patternProperties": functools.partial(_pattern_properties, search),
            "additionalProperties": functools.partial(_additional_properties, search),
            "multipleOf": _multiple_of,
            "$dynamicRef": _unlooked_at,
        },
    )

    @functools.lru_cache(_NUM_KEPT)
    def validator(schema: str) -> Any:
        parsed = json.loads(schema, parse_float=Decimal)
        # A registry of its own: jsonschema's would ask the network for a reference's address.
        return kind(parsed, format_checker=base.FORMAT_CHECKER, registry=REGISTRY)

    def check(schema: str, answer: str) -> str | None:
        try:
            value = json.loads(answer, parse_float=_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is no JSON: {error}"[:MAX_MESSAGE_CHARS]
        found = next(validator(schema).iter_errors(value), None)
        return None if found is None else _message(found)

    return check


@functools.cache
def _decoders_check() -> Check:
    """The check of an answer whose patterns the decoder has held it to: they count as found."""
    return make_check(lambda pattern, text: True)


def schema_error(schema: str, text: str) -> str | None:
    """How what the engine wrote under a schema breaks it all the same; None when it obeys it.

    schema, text  both as JSON; patterns are not looked at again
    """
    try:
        return _decoders_check()(schema, text)
    except RecursionError:
        return "it is nested too deeply to be checked"
    except Exception as error:  # a schema that the decoder reads and jsonschema does not
        return f"it cannot be checked: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # of an exponent so long that it may be anything as large
        number, _, exponent = text.lower().partition("e")
        sign = "-" if exponent.startswith("-") else ""
        return Decimal(f"{number}e{sign}{_HUGE_EXPONENT}")


def _message(error: Any) -> str:
    where = "/".join(str(step) for step in error.absolute_path)
    message = f"at /{where}: {error.message}"[:MAX_MESSAGE_CHARS]
    # A name in the answer may be half a surrogate pair, which no event can carry.
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


def _unlooked_at(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """A keyword of which the linter says so; it may lead nowhere."""
    yield from ()


def _multiple_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number") and not _is_multiple(instance, value):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {value}")


def _is_multiple(number: int | Decimal, step: int | Decimal) -> bool:
    """Exactly, whatever their digits and exponents; Decimal's own `%` gives up after 28 digits."""
    units, exponent, num_digits = _units(number)
    step_units, step_exponent, _ = _units(step)
    shift = exponent - step_exponent
    if shift >= 0:
        return units * pow(10, shift, step_units) % step_units == 0
    return units == 0 or (-shift <= num_digits and units % (step_units * 10**-shift) == 0)


def _units(number: int | Decimal) -> tuple[int, int, int]:
    """-> units, exponent, digits of the units: the number is plus or minus units * 10**exponent."""
    _, digits, exponent = Decimal(number).as_tuple()
    assert isinstance(exponent, int)  # JSON has finite numbers only
    return int(Decimal((0, digits, 0))), exponent, len(digits)
