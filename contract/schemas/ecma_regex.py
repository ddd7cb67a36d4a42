r"""Parse regular expressions of ECMA-262, as JSON Schema asks: with the flag u.

A pattern is a sequence of code points; `\p{L}`, `\u{1F600}` and named groups are read. What the
flag makes an error although it is plain text without it (`\-`, `\Z`, `a{,3}`, a lone `]`) is that
text, as in ECMA-262's Annex B. Nothing here matches: the tree says what a pattern means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from contract.schemas.unicode_properties import LAST, Ranges, complement, merged, property_ranges

#: Largest number of `\p` in a pattern: each may have hundreds of ranges.
MAX_PROPERTIES = 16

_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_CONTROLS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_DIGITS = "0123456789"
_COUNTS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_FLAGS = re.compile(r"\?(?:[ims]{1,3}(?:-[ims]{0,3})?|-[ims]{1,3}):")
_HEX = re.compile(r"u([0-9A-Fa-f]{4})|u\{0*([0-9A-Fa-f]{1,7})\}|x([0-9A-Fa-f]{2})")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_NUMBER = re.compile("[1-9][0-9]*")
_SET = re.compile(r"[dDwWsS]|[pP]\{([A-Za-z0-9_=]*)\}")


class BadPattern(Exception):
    """The pattern is not a regular expression, or not one that all engines can match.

    is_invalid  it is not a regular expression of ECMA-262
    """

    def __init__(self, problem: str, *, is_invalid: bool = False) -> None:
        super().__init__(problem)
        self.is_invalid = is_invalid


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these code points, sorted and disjoint ranges."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Assertion:
    """A place in the text: "^", "$", "b" (the edge of a word) or "B" (no edge)."""

    kind: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    branches: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A node `low` to `high` times; None: any number of times."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A valid part that an automaton cannot match. `problem` says what the pattern does."""

    problem: str


Node = Characters | Assertion | Choice | Repeat | Unsupported
_LOOKS = Unsupported("looks ahead or behind, which cannot be followed in linear time")
_REFERS = Unsupported("refers back to a group, which cannot be followed in linear time")
_SETS_FLAGS = Unsupported("sets flags inside: write the characters out instead")


def parse(pattern: str) -> Choice:
    """Return the tree of a pattern. Raises BadPattern, which is always invalid."""
    try:
        return _Parser(pattern).whole()
    except RecursionError:
        raise _invalid("is nested too deeply") from None


def _invalid(problem: str) -> BadPattern:
    return BadPattern(f"is not a regular expression of ECMA-262: {problem}", is_invalid=True)


class _Parser:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text, self._at = pattern, 0
        self._num_groups = self._num_properties = 0
        self._names: frozenset[str] = frozenset()  # names of the groups in this branch so far
        self._all_names: set[str] = set()
        self._numbers_used: list[int] = []
        self._names_used: list[str] = []

    def whole(self) -> Choice:
        tree = self._choice()
        if self._at < len(self._text):
            raise _invalid("a ) has no (")
        if any(number > self._num_groups for number in self._numbers_used):
            raise _invalid("it refers to a group that it does not have")
        if any(name not in self._all_names for name in self._names_used):
            raise _invalid("it refers to a group that it does not have")
        return tree

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _next(self, missing: str) -> str:
        if self._at == len(self._text):
            raise _invalid(missing)
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Choice:
        branches, before, names = [], self._names, self._names
        while True:
            self._names = before
            branches.append(self._branch())
            names |= self._names
            if not self._take("|"):
                self._names = names
                return Choice(tuple(branches))

    def _branch(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            node = self._atom()
            nodes.append(node if isinstance(node, Assertion) else self._counted(node))
        return tuple(nodes)

    def _counted(self, node: Node) -> Node:
        """Return the node with the count that follows it, if one does."""
        if found := self._match(_COUNTS):
            low = int(found[1][:9])
            high = low if found[2] is None else int(found[3][:9]) if found[3] else None
            if high is not None and high < low:
                raise _invalid("the numbers of a count are in the wrong order")
        elif self._take("*"):
            low, high = 0, None
        elif self._take("+"):
            low, high = 1, None
        elif self._take("?"):
            low, high = 0, 1
        else:
            return node
        self._take("?")  # as few as possible: the same texts match
        return Repeat(node, low, high)

    def _atom(self) -> Node:
        if self._text[self._at] in "*+?" or _COUNTS.match(self._text, self._at):
            raise _invalid("there is nothing to repeat")
        character = self._next("")
        match character:
            case "^" | "$":
                return Assertion(character)
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return Characters(tuple(complement(_LINE_ENDS)))
            case "\\":
                return self._escape()
        return _one(ord(character))

    def _group(self) -> Node:
        if looks := any(self._take(mark) for mark in ("?=", "?!", "?<=", "?<!")):
            pass
        elif sets_flags := self._match(_FLAGS):
            letters = re.sub("[^ims]", "", sets_flags[0])
            if len(set(letters)) < len(letters):
                raise _invalid("it sets a flag twice")
        elif self._take("?<"):
            self._named()
        elif not self._take("?:"):
            if self._take("?"):
                raise _invalid(f"there is no group (?{self._text[self._at : self._at + 1]}")
            self._num_groups += 1
        inner = self._choice()
        if not self._take(")"):
            raise _invalid("a ( has no )")
        if looks:
            return _LOOKS
        return _SETS_FLAGS if sets_flags else inner

    def _named(self) -> None:
        self._num_groups += 1
        name = self._name()
        if name in self._names:
            raise _invalid(f"two groups are called {name[:40]}")
        self._names |= {name}
        self._all_names.add(name)

    def _name(self) -> str:
        """Read a group's name up to the > behind it."""
        end = self._text.find(">", self._at)
        name = self._text[self._at : max(end, self._at)]
        if not name.replace("$", "_").isidentifier():
            raise _invalid("the name of a group must be an identifier")
        self._at = end + 1
        return name

    def _escape(self) -> Node:
        if self._take("b"):
            return Assertion("b")
        if self._take("B"):
            return Assertion("B")
        if self._take("k<"):
            self._names_used.append(self._name())
            return _REFERS
        if found := self._match(_NUMBER):
            self._numbers_used.append(int(found[0][:9]))
            return _REFERS
        return Characters(tuple(self._escaped(in_class=False)))

    def _escaped(self, *, in_class: bool) -> Ranges:
        """Read what follows a backslash: the code points of a set, or one."""
        found = self._match(_SET)
        if found is None:
            code = self._code_point(in_class=in_class)
            return [(code, code)]
        if found[1] is None:
            ranges = _CLASSES[found[0].lower()]
        else:
            ranges = self._property(found[1])
        return complement(ranges) if found[0][0].isupper() else ranges

    def _property(self, expression: str) -> Ranges:
        self._num_properties += 1
        if self._num_properties > MAX_PROPERTIES:
            raise BadPattern(f"uses \\p more than {MAX_PROPERTIES} times")
        ranges = property_ranges(expression)
        if ranges is None:
            raise BadPattern(
                f"uses \\p{{{expression[:60]}}}, which is not known: use one of "
                "the general categories, such as \\p{L}, Any, ASCII and Assigned"
            )
        return ranges

    def _code_point(self, *, in_class: bool) -> int:
        if found := self._match(_HEX):
            code = int(found[1] or found[2] or found[3], 16)
            if code > LAST:
                raise _invalid("a code point is too large")
            if 0xD800 <= code < 0xDC00 and found[1] and (second := self._match(_LOW_HALF)):
                return 0x10000 + ((code - 0xD800) << 10) + int(second[1], 16) - 0xDC00
            return code
        if self._text.startswith(("u{", "p{", "P{"), self._at):
            raise _invalid(f"\\{self._text[self._at]}{{ has no end, or not what may stand in it")
        character = self._next("it ends with a \\")
        after = self._text[self._at : self._at + 1]
        if character == "c":
            if after.isascii() and (after.isalpha() or (in_class and _is_word(after))):
                self._at += 1
                return ord(after) % 32
            self._at -= 1  # the backslash and the c are text
            return ord("\\")
        if character in _DIGITS:
            if character != "0" or (after and after in _DIGITS):
                raise _invalid("a character is written in octal: write \\x and two digits")
            return 0
        if in_class and character == "b":
            return 0x08
        return _CONTROLS.get(character, ord(character))

    def _class(self) -> Characters:
        is_negated = self._take("^")
        ranges: Ranges = []
        while not self._take("]"):
            first, is_one = self._member()
            if self._text.startswith("-]", self._at) or not self._take("-"):
                ranges += first
                continue
            last, is_other = self._member()
            if not is_one or not is_other:  # as in [\w-.]
                ranges += [*first, (0x2D, 0x2D), *last]
            elif last[0][0] < first[0][0]:
                raise _invalid("the ends of a range are in the wrong order")
            else:
                ranges.append((first[0][0], last[0][0]))
        return Characters(tuple(complement(ranges) if is_negated else merged(ranges)))

    def _member(self) -> tuple[Ranges, bool]:
        """Read a member of a class, and whether it is one character, which may begin a range."""
        character = self._next("a [ has no ]")
        if character != "\\":
            return [(ord(character), ord(character))], True
        is_one = _SET.match(self._text, self._at) is None
        return self._escaped(in_class=True), is_one


def _is_word(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _WORD) if character else False


def _one(code: int) -> Characters:
    return Characters(((code, code),))
