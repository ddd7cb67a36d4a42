"""Translate grammars of vLLM's and SGLang's requests into those of the decoder.

Two notations are read. The EBNF of xgrammar and llama.cpp, which has a `::=`:

    root ::= "SELECT " column (", " column)* # a comment
    column ::= [a-z]+ | "*"                  # also ? {2} {2,} {2,5}, (groups), \\n, \\u00e9

and this part of Lark:

    ?start: greeting NAME "!"?               // also * + ~2 ~2..5, [optional], (groups), "a".."z"
    NAME: /[A-Z][a-z]+/

The rest of Lark (%directives, priorities, aliases, templates, flags) is refused by name. Of the
client's text only the characters of its literals are handed on.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import character_range, literal, whole_text

MAX_CHARS = 16_384
MAX_RULES = 500
MAX_DEPTH = 50
MAX_TIMES = 1000
#: What all counts may multiply to; an automaton has as many states.
MAX_SIZE = 20_000


class BadGrammar(Exception):
    """The grammar cannot be read; the message says where."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    """Text that matches a regular expression."""

    regex: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Times:
    item: _Node
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Either:
    """Alternatives, each a sequence."""

    sequences: tuple[tuple[_Node, ...], ...]


_Node = _Text | _Rule | _Times | _Either


def to_lark(text: str) -> str:
    """Translate a grammar into llguidance's Lark. Raises BadGrammar."""
    if len(text) > MAX_CHARS:
        raise BadGrammar(f"has {len(text)} characters; {MAX_CHARS} is the limit")
    is_ebnf = "::=" in text
    tokens = list(_tokens(text, _EBNF if is_ebnf else _LARK))
    rules = _Reader(tokens, is_ebnf=is_ebnf).rules()
    start = "root" if is_ebnf else "start"
    if start not in rules:
        raise BadGrammar(f"has no rule {start}")
    return _Writer(rules).lark(start)


_COMMON = (
    r"(?P<space>\s+)",
    r'(?P<string>"(?:[^"\\\n]|\\.)*")',
    r"(?P<count>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})",
)
_EBNF = re.compile(
    "|".join(
        (
            *_COMMON,
            r"(?P<comment>\#[^\n]*)",
            r"(?P<define>::=)",
            r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)",
            r"(?P<class>\[(?:[^\]\\\n]|\\.)+\])",
            r"(?P<mark>[()|*+?])",
        )
    )
)
_LARK = re.compile(
    "|".join(
        (
            *_COMMON,
            r"(?P<comment>//[^\n]*|\#[^\n]*)",
            r"(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/)",
            r"(?P<times>~\s*\d{1,6}(?:\s*\.\.\s*\d{1,6})?)",
            r"(?P<range>\.\.)",
            r"(?P<define>:)",
            r"(?P<name>(?:[?!](?=[A-Za-z_]\w*\s*:))?[A-Za-z_][A-Za-z0-9_]*)",
            r"(?P<mark>[()|*+?\[\]])",
        )
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str, pattern: re.Pattern[str]) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = pattern.match(text, at)
        if found is None:
            raise BadGrammar(f"line {line}: {_why(text[at : at + 40])}")
        kind = found.lastgroup or ""
        if kind not in ("space", "comment"):
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")
        at = found.end()


def _why(rest: str) -> str:
    """Say what is wrong with text that begins no token."""
    shown = json.dumps(rest.split("\n", 1)[0][:20], ensure_ascii=False)
    for start, what in (
        ("%", "directives are not supported"),
        ("->", "aliases are not supported"),
        (".", "priorities are not supported"),
        ("{", "templates are not supported"),
        ("<", "special tokens are not supported"),
        ('"', "the string has no end"),
        ("'", "strings stand in double quotes"),
    ):
        if rest.startswith(start):
            return f"{what}: {shown}"
    return f"nothing is known that begins {shown}"


class _Reader:
    """Parses tokens into rules, by name. Raises BadGrammar."""

    def __init__(self, tokens: list[_Token], *, is_ebnf: bool) -> None:
        self._tokens = tokens
        self._is_ebnf = is_ebnf
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Either]:
        found: dict[str, _Either] = {}
        while self._at < len(self._tokens):
            name = self._take("name", "the name of a rule").text.lstrip("?!")
            self._take("define", "::=" if self._is_ebnf else ":")
            if name in found:
                raise self._fault(f"there are two rules {name}")
            if len(found) == MAX_RULES:
                raise BadGrammar(f"has more than {MAX_RULES} rules")
            found[name] = self._alternatives()
        for rule in found.values():
            for name in _names(rule):
                if name not in found:
                    raise BadGrammar(f"has no rule {name[:100]}")
        return found

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._at + ahead
        if place < len(self._tokens):
            return self._tokens[place]
        return _Token("end", "its end", self._tokens[-1].line if self._tokens else 1)

    def _take(self, kind: str, what: str) -> _Token:
        token = self._peek()
        if token.kind != kind:
            raise self._fault(f"{what} was expected, not {token.text[:40]}")
        self._at += 1
        return token

    def _skip(self, mark: str) -> bool:
        token = self._peek()
        is_there = token.kind == "mark" and token.text == mark
        self._at += is_there
        return is_there

    def _fault(self, what: str) -> BadGrammar:
        return BadGrammar(f"line {self._peek().line}: {what}")

    def _alternatives(self) -> _Either:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fault(f"groups are nested deeper than {MAX_DEPTH} levels")
        sequences = [self._sequence()]
        while self._skip("|"):
            sequences.append(self._sequence())
        self._depth -= 1
        return _Either(tuple(sequences))

    def _sequence(self) -> tuple[_Node, ...]:
        items: list[_Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
        return tuple(items)

    def _item(self) -> _Node | None:
        token = self._peek()
        if token.kind == "name" and self._peek(1).kind == "define":
            return None  # the next rule begins
        if token.kind == "mark" and token.text in ")|]":
            return None
        if token.kind == "end":
            return None
        self._at += 1
        if token.kind == "name":
            return _Rule(token.text)
        if token.kind == "string":
            return self._string(token)
        if token.kind in ("class", "regex"):
            return _Text(self._regex(token))
        if token.text in "([" and token.kind == "mark":
            return self._group(token.text)
        self._at -= 1
        raise self._fault(f"{token.text[:40]} has nothing before it")

    def _group(self, opening: str) -> _Node:
        inner = self._alternatives()
        closing = ")" if opening == "(" else "]"
        if not self._skip(closing):
            raise self._fault(f"{closing} was expected, not {self._peek().text[:40]}")
        return inner if opening == "(" else _Times(inner, 0, 1)

    def _string(self, token: _Token) -> _Text:
        text = self._unquoted(token.text)
        if self._peek().kind == "range":
            self._at += 1
            last = self._unquoted(self._take("string", "the last character").text)
            if len(text) != 1 or len(last) != 1 or last < text:
                raise self._fault("a range goes from one character to a later one")
            return _Text(character_range(text, last))
        return _Text(literal(text))

    def _unquoted(self, quoted: str) -> str:
        def unescaped(found: re.Match[str]) -> str:
            code = found[1] or found[2] or found[3]
            if code:
                return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\ud800"
            plain = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/", "'": "'"}
            if found[4] not in plain:
                raise self._fault(f"the escape {found[0]} is not known")
            return plain[found[4]]

        pattern = r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))"
        text = re.sub(pattern, unescaped, quoted[1:-1])
        if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
            raise self._fault("half a character of UTF-16 is no text")
        return text

    def _regex(self, token: _Token) -> str:
        pattern = token.text if token.kind == "class" else token.text[1:-1].replace("\\/", "/")
        after = self._peek()
        if token.kind == "regex" and after.kind == "name" and after.text in _FLAGS:
            raise self._fault("flags of regular expressions are not supported")
        try:
            return whole_text(pattern)
        except BadPattern as error:
            raise self._fault(f"{token.text[:40]} {error}") from error

    def _repeated(self, item: _Node) -> _Node:
        token = self._peek()
        low: int
        high: int | None
        if token.kind == "mark" and token.text in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
        elif token.kind in ("count", "times"):
            low, high = _counts(token.text)
            if max(low, high or 0) > MAX_TIMES or (high is not None and high < low):
                raise self._fault(f"{token.text} is no count up to {MAX_TIMES}")
        else:
            return item
        self._at += 1
        if self._peek().kind in ("count", "times") or self._peek().text in ("*", "+", "?"):
            raise self._fault("of two counts in a row the inner one stands in parentheses")
        return _Times(item, low, high)


_FLAGS = frozenset(("i", "m", "s", "x", "l", "u", "is", "si", "im", "ms"))


def _counts(text: str) -> tuple[int, int | None]:
    """Read the counts of {2}, {2,}, {2,5}, ~2 or ~2..5."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    return numbers[0], None if "," in text else numbers[0]


def _names(node: _Node) -> Iterator[str]:
    """Return the rules that a node refers to."""
    if isinstance(node, _Rule):
        yield node.name
    elif isinstance(node, _Times):
        yield from _names(node.item)
    elif isinstance(node, _Either):
        for sequence in node.sequences:
            for item in sequence:
                yield from _names(item)


class _Writer:
    """Writes rules. Rules without recursion become terminals, which the decoder reads as regular
    expressions, exactly; so do the parts between two recursive rules."""

    def __init__(self, rules: dict[str, _Either]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        uses = {name: set(_names(rule)) for name, rule in rules.items()}
        self._looping = _looping(uses)
        self._lines: list[str] = []
        self._sizes: dict[str, int] = {}

    def lark(self, start: str) -> str:
        if sum(self._size(rule) for rule in self._rules.values()) > MAX_SIZE:
            raise BadGrammar(f"repeats more than {MAX_SIZE} times, all counts multiplied")
        for name, rule in self._rules.items():
            body = self._terminal(rule) if name not in self._looping else self._rule(rule)
            self._lines.append(f"{self._name(name)}: {body}")
        return "\n".join([f"start: {self._name(start)}", *self._lines]) + "\n"

    def _size(self, node: _Node) -> int:
        """Return the size of the node once its counts and terminals are written out."""
        if isinstance(node, _Text):
            return 1 + len(node.regex) // 16
        if isinstance(node, _Rule):
            if node.name in self._looping:
                return 1
            if node.name not in self._sizes:
                self._sizes[node.name] = self._size(self._rules[node.name])
            return self._sizes[node.name]
        if isinstance(node, _Times):
            return self._size(node.item) * max(1, node.low, node.high or 0)
        return sum(self._size(item) for sequence in node.sequences for item in sequence)

    def _name(self, name: str) -> str:
        return f"{'r' if name in self._looping else 'T'}_{self._numbers[name]}"

    def _is_terminal(self, node: _Node) -> bool:
        return not self._looping.intersection(_names(node))

    def _terminal(self, node: _Node) -> str:
        if isinstance(node, _Text):
            return f"/{node.regex.replace('/', chr(92) + '/')}/" if node.regex else '""'
        if isinstance(node, _Rule):
            return self._name(node.name)
        if isinstance(node, _Times):
            return f"({self._terminal(node.item)}){_times(node)}"
        written = [
            " ".join(self._terminal(item) for item in sequence) or '""'
            for sequence in node.sequences
        ]
        return written[0] if len(written) == 1 else f"({' | '.join(written)})"

    def _rule(self, node: _Node) -> str:
        if self._is_terminal(node):
            return self._apart(node)
        if isinstance(node, _Times):
            return f"({self._rule(node.item)}){_times(node)}"
        if isinstance(node, _Either):
            return f"({' | '.join(self._rule_sequence(s) for s in node.sequences)})"
        assert isinstance(node, _Rule)
        return self._name(node.name)

    def _rule_sequence(self, sequence: tuple[_Node, ...]) -> str:
        written: list[str] = []
        run: list[_Node] = []
        for item in sequence:
            if self._is_terminal(item):
                run.append(item)
                continue
            if run:
                written.append(self._apart(_Either((tuple(run),))))
            run = []
            written.append(self._rule(item))
        if run:
            written.append(self._apart(_Either((tuple(run),))))
        return " ".join(written) or '""'

    def _apart(self, node: _Node) -> str:
        """Write the node as a terminal of its own."""
        name = f"A_{len(self._lines)}"
        self._lines.append(f"{name}: {self._terminal(node)}")
        return name


def _times(node: _Times) -> str:
    if (node.low, node.high) in _SHORT:
        return _SHORT[node.low, node.high]
    return f"{{{node.low},{'' if node.high is None else node.high}}}"


_SHORT: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def _looping(uses: dict[str, set[str]]) -> set[str]:
    """Return the recursive rules, and those that refer to one."""
    ended: set[str] = set()
    while found := {name for name in uses if name not in ended and uses[name] <= ended}:
        ended |= found
    return uses.keys() - ended
