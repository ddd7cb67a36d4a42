"""Whether a finished answer obeys its schema, by `jsonschema`; runs in a helper process.

Numbers are decimals here: 0.3 is a multiple of 0.1, and 1e999999999 costs no more than 1. Patterns
are RE2's, linear in the answer's length whoever wrote them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import jsonschema
import re2

from worker.patterns import BadPattern, read_pattern

MAX_MESSAGE_CHARS = 300
_NUM_KEPT = 256
#: Beyond all that a schema can compare with, and within what a Decimal holds.
_HUGE_EXPONENT = 10**17


def set_up() -> Callable[[str, str], str | None]:
    """-> (schema, answer), both as JSON text -> where and how the answer fails, None if it does
    not."""
    base = jsonschema.Draft202012Validator
    kind = jsonschema.validators.extend(
        base,
        {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            "multipleOf": _multiple_of,
            "$dynamicRef": _unlooked_at,
        },
    )

    @functools.lru_cache(_NUM_KEPT)
    def validator(schema: str) -> Any:
        parsed = json.loads(schema, parse_float=Decimal)
        return kind(parsed, format_checker=base.FORMAT_CHECKER)

    def check(schema: str, answer: str) -> str | None:
        try:
            value = json.loads(answer, parse_float=_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is no JSON: {error}"[:MAX_MESSAGE_CHARS]
        found = next(validator(schema).iter_errors(value), None)
        return None if found is None else _message(found)

    return check


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


def _pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _is_found(value, instance):
        yield jsonschema.ValidationError(f"no match of {value!r} in {instance!r}")


def _pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for expression, part in value.items():
        for name, item in instance.items():
            if _is_found(expression, name):
                yield from validator.descend(item, part, path=name, schema_path=expression)


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in instance.items():
        if name not in known and not any(_is_found(each, name) for each in expressions):
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
