"""Decimal numbers of JSON, exactly: 0.3 is a multiple of 0.1. Standard library only."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

#: Larger than any exponent in a schema, and small enough for a Decimal.
_HUGE_EXPONENT = 10**17


def read_decimal(text: str) -> Decimal:
    """Return a number of JSON, for `json.loads`; 1e999999999 costs no more than 1."""
    try:
        return Decimal(text)
    # the exponent is too large for a Decimal: any large value gives the same result
    except InvalidOperation:
        number, _, exponent = text.lower().partition("e")
        sign = "-" if exponent.startswith("-") else ""
        return Decimal(f"{number}e{sign}{_HUGE_EXPONENT}")


def is_integer(value: object) -> bool:
    """Return whether the number is an integer in JSON Schema: 1 and 1.0 are, true is not."""
    if isinstance(value, Decimal):
        return is_multiple(value, 1)
    return isinstance(value, int) and not isinstance(value, bool)


def is_multiple(number: int | Decimal, step: int | Decimal) -> bool:
    """Return whether `number` is a multiple, exactly; Decimal's `%` fails after 28 digits."""
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
