r"""Rewrite regular expressions so that every engine reads them alike.

JSON Schema's patterns are ECMA-262's; Python's `re`, the decoder's engine and RE2, which checks
answers, each read some of them differently (`\d`, `\s`, `[a&&b]`, a trailing newline at `$`). So
`contract.schemas.ecma_regex` parses a pattern, and it is written again in what all of them agree
on: explicit code point ranges, groups, alternatives and counts. What cannot be written so is
refused by name, among it everything that needs backtracking.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.schemas.ecma_regex import (
    Assertion,
    BadPattern,
    Characters,
    Choice,
    Node,
    Repeat,
    Unsupported,
    parse,
)
from contract.schemas.unicode_properties import LAST, complement, merged

MAX_PATTERN_CHARS = 256
#: Largest product of all counts of a pattern: RE2's limit.
MAX_REPEATED = 1000
#: Largest number of code point ranges, counted once for each repetition: RE2 takes 100 bytes for
#: one.
MAX_RANGES = 70_000

#: Surrogates of UTF-16, which no text has.
_SURROGATES = (0xD800, 0xDFFF)
#: Any text; `.` alone excludes the ends of lines.
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
_ANYTHING = _ANY_CHARACTER + "*"
_ANY = (Repeat(Characters(((0, LAST),)), 0, None),)


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
    tree = _parse(pattern)
    search = _Writer(keeps_anchors=True).choice(tree)
    try:
        whole = "|".join(_whole_branch(branch) for branch in tree.branches)
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
            writer.sequence(_between_anchors(branch)[0]) for branch in _parse(pattern).branches
        ]
    except _AnchorInside as error:
        raise BadPattern("has an anchor or a word boundary inside") from error
    return f"(?:{'|'.join(parts)})"


def texts_of(pattern: str, most: int) -> list[str] | None:
    """Return all texts in which a pattern is found; None if they are more than `most`.

    Raises BadPattern.
    """
    found: list[str] = []
    for branch in _parse(pattern).branches:
        inner, has_start, has_end = _between_anchors(branch)
        texts = _texts(inner, most) if has_start and has_end else None
        if texts is None:
            return None
        found += texts
    texts = list(dict.fromkeys(found))
    return texts if len(texts) <= most else None


def whole_nodes(pattern: str) -> list[tuple[Node, ...]]:
    """Return the alternatives of the texts in which a pattern is found, each as a whole text.

    The pattern may be one that was written here. Raises BadPattern; anchors inside are left in.
    """
    found = []
    for branch in parse(pattern).branches:
        inner, has_start, has_end = _between_anchors(branch)
        found.append((*(() if has_start else _ANY), *inner, *(() if has_end else _ANY)))
    return found


def literal(text: str) -> str:
    """Return the regular expression of one text."""
    return "".join(_character(ord(character)) for character in text)


def _parse(pattern: str) -> Choice:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"has {len(pattern)} characters; {MAX_PATTERN_CHARS} is the limit")
    return parse(pattern)


class _AnchorInside(Exception):
    pass


_Sequence = tuple[Node, ...]


def _between_anchors(nodes: _Sequence) -> tuple[_Sequence, bool, bool]:
    """Return an alternative's nodes between its anchors, and whether each end has an anchor."""
    has_start = has_end = False
    while nodes and nodes[0] == Assertion("^"):
        nodes, has_start = nodes[1:], True
    while nodes and nodes[-1] == Assertion("$"):
        nodes, has_end = nodes[:-1], True
    return nodes, has_start, has_end


def _whole_branch(nodes: _Sequence) -> str:
    """Write an alternative for a match of the whole text. Raises _AnchorInside."""
    nodes, has_start, has_end = _between_anchors(nodes)
    inner = _Writer(keeps_anchors=False).sequence(nodes)
    return ("" if has_start else _ANYTHING) + inner + ("" if has_end else _ANYTHING)


class _Writer:
    """Writes a parsed pattern. Raises BadPattern; _AnchorInside unless anchors stay."""

    def __init__(self, *, keeps_anchors: bool) -> None:
        self._keeps_anchors = keeps_anchors
        self._repeated = 1
        self._num_ranges = 0

    def choice(self, choice: Choice) -> str:
        return "|".join(self.sequence(branch) for branch in choice.branches)

    def sequence(self, nodes: _Sequence) -> str:
        return "".join(self._node(node) for node in nodes)

    def _node(self, node: Node) -> str:
        match node:
            case Characters(ranges):
                self._num_ranges += self._repeated * len(ranges)
                if self._num_ranges > MAX_RANGES:
                    raise BadPattern("repeats large classes of characters too often")
                if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                    return _character(ranges[0][0])
                return _class(ranges)
            case Choice():
                return f"(?:{self.choice(node)})"
            case Repeat():
                return self._repeat(node)
            case Assertion(kind):
                if not self._keeps_anchors:
                    raise _AnchorInside
                return {"^": r"\A", "$": r"\z", "b": r"\b", "B": r"\B"}[kind]
            case Unsupported(problem):
                raise BadPattern(problem)

    def _repeat(self, node: Repeat) -> str:
        times = max(node.low, node.high or 0, 1)
        before = self._repeated
        self._repeated *= times
        if self._repeated > MAX_REPEATED:
            raise BadPattern(f"repeats more than {MAX_REPEATED} times")
        text = self._node(node.node)
        self._repeated = before
        if node.high is None and node.low in (0, 1):
            return f"(?:{text}){'*+'[node.low]}"
        return f"(?:{text}){{{node.low},{'' if node.high is None else node.high}}}"


def _texts(nodes: _Sequence, most: int) -> list[str] | None:
    """Return the texts of a sequence; None if they are more than `most`, or not certain."""
    texts = [""]
    for node in nodes:
        ends = _texts_of_node(node, most)
        if ends is None or len(texts) * len(ends) > most:
            return None
        texts = list(dict.fromkeys(text + end for text in texts for end in ends))
    return texts


def _texts_of_node(node: Node, most: int) -> list[str] | None:
    match node:
        case Characters(ranges):
            if sum(high - low + 1 for low, high in ranges) > most:
                return None
            return [chr(code) for low, high in ranges for code in range(low, high + 1)]
        case Choice(branches):
            found: list[str] = []
            for branch in branches:
                texts = _texts(branch, most)
                if texts is None or len(found) > most:
                    return None
                found += texts
            return found
        case Repeat(inner, low, high) if high is not None and high <= MAX_REPEATED:
            ends = _texts_of_node(inner, most)
            return None if ends is None else _repeated(ends, low, high, most)
    return None


def _repeated(ends: list[str], low: int, high: int, most: int) -> list[str] | None:
    found = dict.fromkeys([""] if low == 0 else [])
    texts = [""]
    for times in range(1, high + 1):
        if len(texts) * len(ends) > most:
            return None
        before, texts = texts, list(dict.fromkeys(text + end for text in texts for end in ends))
        if times >= low:
            found |= dict.fromkeys(texts)
        if texts == before:  # only empty texts are left to repeat
            break
    return list(found)


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    known = merged(complement([*complement(list(ranges)), _SURROGATES]))
    if not known:
        raise BadPattern("has a class that contains no character")
    spans = [
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}" for low, high in known
    ]
    return f"[{''.join(spans)}]"


def _others(codes: list[int]) -> str:
    """Return the class of every character but these."""
    return _class(tuple(complement([(code, code) for code in codes])))


def _character(code: int) -> str:
    if _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise BadPattern("has half of a surrogate pair")
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


def not_beginning_with(*prefixes: str, after: str) -> str:
    """Return the regular expression of every whole text that begins with none of `prefixes`.

    It may also not begin with characters of `after` and then one of them."""
    blanks = [ord(character) for character in after]
    rests: dict[str, list[str]] = {}
    for prefix in prefixes:
        rests.setdefault(prefix[0], []).append(prefix[1:])
    ways = [_others([*blanks, *map(ord, rests)]) + _ANYTHING]
    for first, rest in rests.items():
        if "" not in rest:
            ways.append(_character(ord(first)) + _excluding(rest, is_prefix=True))
    return f"{_class(tuple((code, code) for code in blanks))}*(?:{'|'.join(ways)})?"


def _excluding(texts: list[str], *, is_prefix: bool) -> str:
    """Return an expression of texts that part from each of `texts` at any character, or end."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        if text:
            tails.setdefault(text[0], []).append(text[1:])
    if is_prefix and "" in texts:
        raise ValueError("every text begins so")
    ways = []
    if tails:
        ways.append(_others([ord(first) for first in tails]) + _ANYTHING)
    else:
        ways.append(_ANY_CHARACTER + "+")
    for first, rest in tails.items():
        if is_prefix and "" in rest:
            continue
        ways.append(_character(ord(first)) + _excluding(rest, is_prefix=is_prefix))
    may_end = "" not in texts
    return f"(?:{'|'.join(ways)}){'?' if may_end else ''}"
