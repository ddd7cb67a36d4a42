"""Find the modules that a pattern of adapter_config.json means: `re` in bounded time.

PEFT gives target_modules, exclude_modules, rank_pattern and alpha_pattern to Python's `re`, which
backtracks: thirty characters of a stranger can keep it busy for years. Here Python's own parser
reads a pattern, but all names are searched at once, in steps that are counted. The names are joined
to one text, and a set of positions in it is one integer. Each part of a pattern maps the positions
where it may begin to those where it may end; as no group's text is needed, that is the whole match.
It is exact, look-ahead and look-behind included; back references (`\\1`) and possessive repeats
(`a*+`) are refused.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

#: Longest key of rank_pattern or alpha_pattern; longest expression of target_modules or
#: exclude_modules.
MAX_KEY_CHARS = 256
MAX_PATTERN_CHARS = 2048
#: Largest number of steps for all patterns of an adapter; 2,048 full names take about 100,000.
MAX_STEPS = 300_000
_MAX_DEPTH = 40

_parser: Any = importlib.import_module("re._parser")
_Value = TypeVar("_Value")


class BadPattern(Exception):
    """The pattern is not a regular expression, or not one that can be matched in bounded time."""


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character: one of `members`, as the parser has them, or of no other."""

    members: tuple[tuple[str, Any], ...]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    low: int
    high: int | None  # None: without a limit
    inner: _Node


@dataclass(frozen=True, slots=True)
class _At:
    kind: str


@dataclass(frozen=True, slots=True)
class _Look:
    inner: _Node
    is_behind: bool
    is_negated: bool


_Node = _Chars | _Sequence | _Choice | _Repeat | _At | _Look
_ANY = _Chars((), is_negated=True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed expression."""

    text: str
    root: _Node


def read_pattern(text: str) -> Pattern:
    """Parse an expression of target_modules or exclude_modules. Raises BadPattern."""
    return Pattern(text, _read(text, text, MAX_PATTERN_CHARS))


def read_key(text: str) -> Pattern:
    """Parse a key of rank_pattern or alpha_pattern as PEFT extends it. Raises BadPattern.

    Source: get_pattern_key in peft/utils/other.py.
    """
    return Pattern(text, _read(text, rf"(.*\.)?({text})$", MAX_KEY_CHARS))


def _read(text: str, whole: str, max_chars: int) -> _Node:
    if len(text) > max_chars:
        raise BadPattern(f"has {len(text)} characters; {max_chars} is the limit")
    try:
        parsed = _parser.parse(whole)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadPattern(f"is not a regular expression: {error}") from error
    if parsed.state.flags & ~re.UNICODE.value:
        raise BadPattern("sets flags inside, which is not supported")
    return _node(parsed, 0)


def _node(parsed: Any, depth: int) -> _Node:
    if depth > _MAX_DEPTH:
        raise BadPattern("is nested too deeply")
    parts = tuple(_item(str(kind), value, depth + 1) for kind, value in parsed)
    return parts[0] if len(parts) == 1 else _Sequence(parts)


def _item(kind: str, value: Any, depth: int) -> _Node:
    match kind:
        case "LITERAL" | "NOT_LITERAL":
            return _literal(value, kind == "NOT_LITERAL")
        case "ANY":
            return _ANY
        case "IN":
            members = tuple((str(name), given) for name, given in value)
            inside = tuple(member for member in members if member[0] != "NEGATE")
            return _Chars(inside, is_negated=len(inside) < len(members))
        case "BRANCH":
            return _Choice(tuple(_node(branch, depth) for branch in value[1]))
        case "SUBPATTERN" if not value[1] and not value[2]:
            return _node(value[3], depth)
        case "MAX_REPEAT" | "MIN_REPEAT":  # they differ only in which way is tried first
            low, high, inner = value
            limit = None if str(high) == "MAXREPEAT" else int(high)
            return _Repeat(int(low), limit, _node(inner, depth))
        case "AT":
            return _At(str(value))
        case "ASSERT" | "ASSERT_NOT":
            direction, inner = value
            if direction < 0 and len(set(inner.getwidth())) > 1:  # Python has the same rule
                raise BadPattern(
                    "is not a regular expression: a look-behind must have a fixed length"
                )
            return _Look(_node(inner, depth), direction < 0, kind == "ASSERT_NOT")
    raise BadPattern(_REFUSED.get(kind, f"uses {kind.lower().replace('_', ' ')}"))


# most patterns are names: keep one node for each letter, not for each place
@functools.lru_cache(maxsize=256)
def _literal(code: int, is_negated: bool) -> _Chars:
    return _Chars((("LITERAL", code),), is_negated)


_REFUSED = {
    "SUBPATTERN": "sets flags inside, which is not supported",
    "GROUPREF": "refers back to a group, which is not supported",
    "GROUPREF_EXISTS": "refers back to a group, which is not supported",
    "POSSESSIVE_REPEAT": "has a possessive repetition, which is not supported",
    "ATOMIC_GROUP": "has an atomic group, which is not supported",
}


class ModuleNames:
    """The names that patterns are matched with: ASCII, without line ends.

    Counts the steps of all patterns: one for each adapter. Its methods raise BadPattern when they
    are more than MAX_STEPS; one takes about a microsecond.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._steps = 0
        self._offsets = []
        self._begins = self._ends = length = 0
        for name in self._names:
            self._offsets.append(length)
            self._begins |= 1 << length
            length += len(name) + 1
            self._ends |= 1 << (length - 1)
        text = "".join(f"{name}\n" for name in self._names)
        self._reversed, self._alphabet = text[::-1], set(text) - {"\n"}
        self._characters = ((1 << length) - 1) & ~self._ends
        self._positions = self._characters | self._ends
        self._masks: dict[_Chars, int] = {}

    def whole(self, pattern: Pattern) -> frozenset[str]:
        """Return the names that the pattern matches from end to end."""
        found = self._run(pattern.root, self._begins, False) & self._ends
        return frozenset(self._names[index] for index in self._indices(found))

    def first(self, patterns: Sequence[tuple[Pattern, _Value]]) -> dict[str, _Value]:
        """Return name -> the value of the first key that matches it, as PEFT does."""
        values: dict[str, _Value] = {}
        left = self._begins
        for pattern, value in patterns:
            for index in self._indices(self._run(pattern.root, left, False)):
                values[self._names[index]] = value
                left &= ~(1 << self._offsets[index])
        return values

    def _indices(self, positions: int) -> list[int]:
        """Return the names that have a position in the set."""
        found = []
        bits = f"{positions:b}"[::-1] if positions else ""
        at = bits.find("1")
        while at >= 0:
            index = bisect.bisect_right(self._offsets, at) - 1
            found.append(index)
            at = bits.find("1", self._offsets[index] + len(self._names[index]) + 1)
        return found

    def _run(self, node: _Node, at: int, back: bool) -> int:
        """Return where the node may end if it begins at `at`; with `back`, the other way."""
        if not at:
            return 0
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise BadPattern(f"takes more than {MAX_STEPS:,} steps to match")
        match node:
            case _Chars():
                return (at >> 1) & self._mask(node) if back else (at & self._mask(node)) << 1
            case _Sequence(parts):
                for part in reversed(parts) if back else parts:
                    at = self._run(part, at, back)
                return at
            case _Choice(branches):
                found = 0
                for branch in branches:
                    found |= self._run(branch, at, back)
                return found
            case _Repeat():
                return self._repeat(node, at, back)
            case _At(kind):
                return self._anchored(kind, at)
            case _Look(inner, is_behind, is_negated):
                seen = self._run(inner, self._positions, not is_behind)
                return at & ~seen if is_negated else at & seen

    def _repeat(self, node: _Repeat, at: int, back: bool) -> int:
        count = 0
        while at and count < node.low:
            after = self._run(node.inner, at, back)
            if after == at:  # nothing new: the set would not change again
                break
            at, count = after, count + 1
        if node.high is None and isinstance(node.inner, _Chars) and not back:
            # A sum carries each position to the end of its run of fitting characters.
            mask = self._mask(node.inner)
            return (((at & mask) + mask) ^ mask) | at
        fresh, count = at, node.low
        while fresh and (node.high is None or count < node.high):
            fresh = self._run(node.inner, fresh, back) & ~at
            at, count = at | fresh, count + 1
        return at

    def _anchored(self, kind: str, at: int) -> int:
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return at & self._begins
        if kind in ("AT_END", "AT_END_STRING"):
            return at & self._ends
        words = self._mask(_Chars((("CATEGORY", "CATEGORY_WORD"),), is_negated=False))
        edges = words ^ (words << 1)
        return at & edges if kind == "AT_BOUNDARY" else at & ~edges

    def _mask(self, node: _Chars) -> int:
        """Return the characters of the text that the node takes."""
        mask = self._masks.get(node)
        if mask is None:
            taken = {
                ord(character): "01"[
                    any(_has(*member, character) for member in node.members) != node.is_negated
                ]
                for character in self._alphabet
            }
            bits = self._reversed.translate({**taken, ord("\n"): "0"})
            mask = self._masks[node] = int(bits or "0", 2)
        return mask


_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


def _has(kind: str, value: Any, character: str) -> bool:
    if kind == "LITERAL":
        return bool(ord(character) == value)
    if kind == "RANGE":
        return bool(value[0] <= ord(character) <= value[1])
    name = str(value)  # a category, such as CATEGORY_NOT_DIGIT
    is_in = re.match(_CATEGORIES[name.rsplit("_", 1)[-1]], character) is not None
    return is_in != ("_NOT_" in name)
