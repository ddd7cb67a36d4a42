r"""Parse regular expressions and rewrite them so that every engine reads them alike.

JSON Schema's patterns are ECMA-262's; Python's `re`, the decoder's engine and RE2, which checks
answers, each read some of them differently (`\d`, `\s`, `[a&&b]`, a trailing newline at `$`). So
a pattern is parsed by Python's own parser and written again in what all of them agree on: explicit
code point ranges, groups, alternatives and counts. What cannot be written so is refused by name,
among it everything that needs backtracking.
"""

from __future__ import annotations

import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

MAX_PATTERN_CHARS = 256
#: The most that all counts of a pattern multiply to; the automaton has as many states.
MAX_REPEATED = 10_000

_parser: Any = importlib.import_module("re._parser")
_LAST = 0x10FFFF
#: Surrogates of UTF-16, which no text has.
_SURROGATES = (0xD800, 0xDFFF)
_Ranges = list[tuple[int, int]]

_DIGIT: _Ranges = [(0x30, 0x39)]
_WORD: _Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
# Space in both ECMA-262 and Python, so that an answer is valid for clients of both.
_SPACE: _Ranges = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
]  # fmt: skip
#: Space in only one of them: neither `\s` nor `\S`.
_ODD_SPACE: _Ranges = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_LINE_END: _Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
#: Any text; `.` alone excludes the ends of lines.
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
ANYTHING = _ANY_CHARACTER + "*"


class BadPattern(Exception):
    """The pattern is no regular expression, or not one that all engines can match.

    is_invalid  it is not a regular expression in any dialect
    """

    def __init__(self, problem: str, *, is_invalid: bool = False) -> None:
        super().__init__(problem)
        self.is_invalid = is_invalid


@dataclass(frozen=True, slots=True)
class Pattern:
    """A rewritten pattern.

    search  finds it anywhere in a text, as JSON Schema's `pattern` does; for RE2
    whole   matches the texts in which `search` finds it, whole; None: there are anchors or word
            boundaries in it that only a search understands
    """

    search: str
    whole: str | None


def read_pattern(pattern: str) -> Pattern:
    """Parse and rewrite a pattern. Raises BadPattern."""
    top = _parse(pattern)
    search = _Writer(keeps_anchors=True).alternatives(top)
    try:
        whole = "|".join(_whole_branch(list(branch)) for branch in _branches(top))
    except _AnchorInside:
        return Pattern(search, None)
    return Pattern(search, f"(?:{whole})")


def whole_text(pattern: str) -> str:
    """Return a regular expression of the texts that `pattern` matches from end to end.

    Raises BadPattern.
    """
    writer = _Writer(keeps_anchors=False)
    try:
        parts = [
            "".join(writer.item(item) for item in _without_anchors(list(branch))[0])
            for branch in _branches(_parse(pattern))
        ]
    except _AnchorInside as error:
        raise BadPattern("has an anchor or a word boundary inside") from error
    return f"(?:{'|'.join(parts)})"


def literal(text: str) -> str:
    """Return the regular expression of one text."""
    return "".join(_character(ord(character)) for character in text)


def _parse(pattern: str) -> Any:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"has {len(pattern)} characters; {MAX_PATTERN_CHARS} is the limit")
    # ECMA's name for a group; a look-behind begins alike.
    pattern = re.sub(r"\(\?<(?![=!])", "(?P<", pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadPattern(f"is no regular expression: {error}", is_invalid=True) from error
    if parsed.state.flags & ~re.UNICODE.value:
        raise BadPattern("sets flags inside; ECMA-262 has none there")
    return parsed


def _branches(parsed: Any) -> list[Any]:
    """Return the alternatives of the whole pattern."""
    items = list(parsed)
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [list(branch) for branch in items[0][1][1]]
    return [items]


class _AnchorInside(Exception):
    pass


def _without_anchors(items: list[Any]) -> tuple[list[Any], bool, bool]:
    """Return an alternative's items between its anchors, and whether each end has one."""
    has_start = has_end = False
    while items and str(items[0][0]) == "AT" and "BEGINNING" in str(items[0][1]):
        items, has_start = items[1:], True
    while items and str(items[-1][0]) == "AT" and "END" in str(items[-1][1]):
        items, has_end = items[:-1], True
    return items, has_start, has_end


def _whole_branch(items: list[Any]) -> str:
    """Write an alternative for a match of the whole text. Raises _AnchorInside."""
    items, has_start, has_end = _without_anchors(items)
    writer = _Writer(keeps_anchors=False)
    inner = "".join(writer.item(item) for item in items)
    return ("" if has_start else ANYTHING) + inner + ("" if has_end else ANYTHING)


class _Writer:
    """Writes what Python's parser read. Raises BadPattern; _AnchorInside unless anchors stay."""

    def __init__(self, *, keeps_anchors: bool) -> None:
        self._keeps_anchors = keeps_anchors
        self._repeated = 1

    def alternatives(self, parsed: Any) -> str:
        return "".join(self.item(item) for item in parsed)

    def item(self, item: tuple[Any, Any]) -> str:
        kind, value = str(item[0]), item[1]
        match kind:
            case "LITERAL":
                return _character(value)
            case "NOT_LITERAL":
                return _class([(value, value)], is_negated=True)
            case "ANY":
                return _class(_LINE_END, is_negated=True)
            case "IN":
                return self._set(value)
            case "BRANCH":
                return f"(?:{'|'.join(self.alternatives(branch) for branch in value[1])})"
            case "SUBPATTERN":
                return self._group(value)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(*value)
            case "AT":
                return self._anchor(str(value))
        raise BadPattern(_REASONS.get(kind, f"uses {kind.lower().replace('_', ' ')}"))

    def _group(self, value: Any) -> str:
        _, added, removed, inner = value
        if added or removed:
            raise BadPattern("sets flags inside; ECMA-262 has none there")
        return f"(?:{self.alternatives(inner)})"

    def _repeat(self, low: int, high: Any, inner: Any) -> str:
        is_open = str(high) == "MAXREPEAT"
        times = max(int(low) if is_open else int(high), 1)
        before = self._repeated
        self._repeated *= times
        if self._repeated > MAX_REPEATED:
            raise BadPattern(f"repeats more than {MAX_REPEATED} times")
        text = self.alternatives(inner)
        self._repeated = before
        if times > 1000:  # RE2's limit
            raise BadPattern("repeats more than 1000 times")
        if is_open and low in (0, 1):
            return f"(?:{text}){'*+'[low]}"
        return f"(?:{text}){{{low},{'' if is_open else high}}}"

    def _anchor(self, name: str) -> str:
        if not self._keeps_anchors:
            raise _AnchorInside
        anchors = {
            "AT_BEGINNING": r"\A", "AT_BEGINNING_STRING": r"\A", "AT_END": r"\z",
            "AT_END_STRING": r"\z", "AT_BOUNDARY": r"\b", "AT_NON_BOUNDARY": r"\B",
        }  # fmt: skip
        return anchors[name]

    def _set(self, members: list[tuple[Any, Any]]) -> str:
        ranges: _Ranges = []
        is_negated = False
        for kind, value in members:
            match str(kind):
                case "NEGATE":
                    is_negated = True
                case "LITERAL":
                    ranges.append((value, value))
                case "RANGE":
                    ranges.append(value)
                case "CATEGORY":
                    ranges += _category(str(value))
        return _class(ranges, is_negated=is_negated)


_REASONS = {
    "ASSERT": "looks ahead or behind, which cannot be followed in linear time",
    "ASSERT_NOT": "looks ahead or behind, which cannot be followed in linear time",
    "GROUPREF": "refers back to a group, which cannot be followed in linear time",
    "GROUPREF_EXISTS": "refers back to a group, which cannot be followed in linear time",
}


def _category(name: str) -> _Ranges:
    kind = name.rsplit("_", 1)[-1]
    ranges = {"DIGIT": _DIGIT, "WORD": _WORD, "SPACE": _SPACE}[kind]
    if "_NOT_" not in name:
        return ranges
    return _complement([*ranges, *_ODD_SPACE] if kind == "SPACE" else ranges)


def _complement(ranges: _Ranges) -> _Ranges:
    gaps, start = [], 0
    for low, high in _merged(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return [*gaps, (start, _LAST)] if start <= _LAST else gaps


def _merged(ranges: _Ranges) -> _Ranges:
    merged: _Ranges = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _class(ranges: _Ranges, *, is_negated: bool) -> str:
    if is_negated:
        ranges = _complement(ranges)
    ranges = _complement([*_complement(ranges), _SURROGATES])
    if not ranges:
        raise BadPattern("has a class that no character is in")
    spans = [
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
        for low, high in _merged(ranges)
    ]
    return f"[{''.join(spans)}]"


def _character(code: int) -> str:
    if _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise BadPattern("has half a character")
    return _escaped(code)


def _escaped(code: int) -> str:
    """Escape a code point for Python's `re`, RE2 and the decoder, also inside a class."""
    character = chr(code)
    if not character.isascii():
        return character
    return character if character.isalnum() else f"\\x{code:02X}"


def other_than(texts: list[str]) -> str:
    """Return the regular expression of every text but these, whole."""
    return _excluding(texts, is_prefix=False)


def not_beginning_with(prefix: str, *, after: str) -> str:
    """Return the regular expression of every text, whole, that does not begin with `prefix`, nor
    with one of the characters `after` and then `prefix`."""
    blanks = [(ord(character), ord(character)) for character in after]
    first = ord(prefix[0])
    ways = [_class([*blanks, (first, first)], is_negated=True) + ANYTHING]
    if len(prefix) > 1:
        ways.append(_character(first) + _excluding([prefix[1:]], is_prefix=True))
    return f"{_class(blanks, is_negated=False)}*(?:{'|'.join(ways)})?"


def _excluding(texts: list[str], *, is_prefix: bool) -> str:
    """A text may part from each of `texts` at any character, or end before them."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        if text:
            tails.setdefault(text[0], []).append(text[1:])
    if is_prefix and "" in texts:
        raise ValueError("every text begins so")
    ways = []
    if tails:
        others = _class([(ord(first), ord(first)) for first in tails], is_negated=True)
        ways.append(others + ANYTHING)
    else:
        ways.append(_ANY_CHARACTER + "+")
    for first, rest in tails.items():
        if is_prefix and "" in rest:
            continue
        ways.append(_character(ord(first)) + _excluding(rest, is_prefix=is_prefix))
    may_end = "" not in texts
    return f"(?:{'|'.join(ways)}){'?' if may_end else ''}"
