r"""The code points of ECMA-262's `\p{…}`, as Python's Unicode data has them."""

from __future__ import annotations

import functools
import itertools
import unicodedata

Ranges = list[tuple[int, int]]

LAST = 0x10FFFF
#: Short names of general categories -> long names, as ECMA-262 writes both.
_CATEGORIES = {
    "C": "Other", "Cc": "Control cntrl", "Cf": "Format", "Cn": "Unassigned", "Co": "Private_Use",
    "Cs": "Surrogate", "L": "Letter", "LC": "Cased_Letter", "Ll": "Lowercase_Letter",
    "Lm": "Modifier_Letter", "Lo": "Other_Letter", "Lt": "Titlecase_Letter",
    "Lu": "Uppercase_Letter", "M": "Mark Combining_Mark", "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark", "Mn": "Nonspacing_Mark", "N": "Number", "Nd": "Decimal_Number digit",
    "Nl": "Letter_Number", "No": "Other_Number", "P": "Punctuation punct",
    "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation", "Pe": "Close_Punctuation",
    "Pf": "Final_Punctuation", "Pi": "Initial_Punctuation", "Po": "Other_Punctuation",
    "Ps": "Open_Punctuation", "S": "Symbol", "Sc": "Currency_Symbol", "Sk": "Modifier_Symbol",
    "Sm": "Math_Symbol", "So": "Other_Symbol", "Z": "Separator", "Zl": "Line_Separator",
    "Zp": "Paragraph_Separator", "Zs": "Space_Separator",
}  # fmt: skip
_SHORT = {name: short for short, names in _CATEGORIES.items() for name in [short, *names.split()]}


def property_ranges(expression: str) -> Ranges | None:
    r"""Return the code points of `\p{expression}`; None for an unknown property."""
    name, equals, value = expression.rpartition("=")
    if equals and name not in ("gc", "General_Category"):
        return None
    if not equals and value in ("Any", "ASCII", "Assigned"):
        last = 0x7F if value == "ASCII" else LAST
        return complement(_of_category("Cn")) if value == "Assigned" else [(0, last)]
    short = _SHORT.get(value)
    return None if short is None else _of_category(short)


@functools.cache
def _of_category(short: str) -> Ranges:
    parts = ("Ll", "Lt", "Lu") if short == "LC" else (short,)
    by_category = _by_category()
    return merged(
        [pair for name in by_category if name.startswith(parts) for pair in by_category[name]]
    )


@functools.cache
def _by_category() -> dict[str, Ranges]:
    found: dict[str, Ranges] = {}
    at = 0
    categories = map(unicodedata.category, map(chr, range(LAST + 1)))
    for name, run in itertools.groupby(categories):
        start, at = at, at + sum(1 for _ in run)
        found.setdefault(name, []).append((start, at - 1))
    return found


def complement(ranges: Ranges) -> Ranges:
    """Return all other code points."""
    gaps, start = [], 0
    for low, high in merged(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return [*gaps, (start, LAST)] if start <= LAST else gaps


def merged(ranges: Ranges) -> Ranges:
    """Return the same code points as sorted ranges that do not touch."""
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found
