"""Ranges of numbers, each written beside the dataclass's field that it bounds."""

from __future__ import annotations

import dataclasses
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a field may have: `temperature: Annotated[float, Range(0, 2)]`.

    is_open                the least number itself is excluded
    is_whole, may_be_none  set by `ranges_of`, from the field's type
    """

    least: float
    most: float
    is_open: bool = False
    is_whole: bool = False
    may_be_none: bool = False

    def has(self, value: Any) -> bool:
        """Return whether a field may have the value; NaN and booleans are no numbers."""
        if value is None:
            return self.may_be_none
        number: Any = Integral if self.is_whole else Real
        if isinstance(value, bool) or not isinstance(value, number):
            return False
        return bool(self.least <= value <= self.most) and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        """Return the words for an error: `a whole number from 1 to 256`."""
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} {'above' if self.is_open else 'from'} {self.least} to {self.most}"


def ranges_of(kind: type) -> dict[str, Range]:
    """Return the ranges in a dataclass's annotations, by its fields' names."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Range):
                types = get_args(hint.__origin__) or (hint.__origin__,)
                found[name] = dataclasses.replace(
                    each, is_whole=float not in types, may_be_none=type(None) in types
                )
    return found
