"""Translate grammars of vLLM's and SGLang's requests into Lark, which the decoder reads.

A text with a `::=` is the EBNF of xgrammar and llama.cpp:

    root ::= "SELECT " column (", " column)* # a comment
    column ::= [a-z]+ | "*"                  # also ? {2} {2,} {2,5}, (groups), \\n, \\u00e9

Of it only the characters of its literals are handed on. Any other text is Lark already; a worker
says what is wrong with it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import literal, whole_text

MAX_CHARS = 16_384
MAX_RULES = 500
MAX_DEPTH = 50
MAX_TIMES = 1000
#: What all counts may multiply to; an automaton has as many states.
MAX_SIZE = 20_000


class BadGrammar(Exception):
    """The grammar cannot be read; the message says where."""


def to_lark(text: str) -> str:
    """Return a grammar in llguidance's Lark. Raises BadGrammar."""
    if len(text) > MAX_CHARS:
        raise BadGrammar(f"has {len(text)} characters; {MAX_CHARS} is the limit")
    if not text.strip():
        raise BadGrammar("is empty")
    return _Translation(_rules(text)).lark() if "::=" in text else text


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


_NAME = "[A-Za-z_][A-Za-z0-9_.-]*"
_TOKEN = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>{_NAME})\s*::=
    |(?P<name>{_NAME})
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[(?:[^\]\\\n]|\\.)+\])
    |(?P<count>[*+?]|\{{\s*\d{{1,6}}\s*(?:,\s*(?:\d{{1,6}})?\s*)?\}})
    |(?P<mark>[()|])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/", "'": "'"}


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            shown = json.dumps(text[at : at + 20].split("\n", 1)[0], ensure_ascii=False)
            why = "the string has no end" if text[at] == '"' else "this is no part of a grammar"
            raise BadGrammar(f"line {line}: {why}: {shown}")
        kind = found.lastgroup or ""
        if kind != "space":
            yield _Token(kind, found[kind], line)
        line += found[0].count("\n")
        at = found.end()


def _rules(text: str) -> dict[str, list[_Token]]:
    """Return the tokens of each rule, behind its `::=`. Raises BadGrammar."""
    rules: dict[str, list[_Token]] = {}
    for kind, name, line in _tokens(text):
        if kind == "rule":
            if name in rules:
                raise BadGrammar(f"line {line}: there are two rules {name}")
            rules[name] = body = []
        elif not rules:
            raise BadGrammar(f"line {line}: the name of a rule was expected, not {name[:40]}")
        else:
            body.append(_Token(kind, name, line))
    if len(rules) > MAX_RULES:
        raise BadGrammar(f"has more than {MAX_RULES} rules")
    named = {"root", *(t.text for body in rules.values() for t in body if t.kind == "name")}
    if missing := named - rules.keys():
        raise BadGrammar(f"has no rule {min(missing)[:100]}")
    return rules


class _Part(NamedTuple):
    """A part of a rule in Lark.

    size         number of its elements with counts and terminals written out
    is_terminal  whether it refers to no recursive rule
    """

    lark: str
    size: int
    is_terminal: bool = True


class _Translation:
    """The translation of rules.

    Rules without recursion become terminals, which the decoder reads as regular expressions,
    exactly; so do the parts between two recursive rules.
    """

    def __init__(self, rules: dict[str, list[_Token]]) -> None:
        self._rules = rules
        self._parts: dict[str, _Part] = {}  # rule -> a reference to it
        self._lines: list[str] = []
        self._depth = self._at = 0

    def lark(self) -> str:
        plain = self._without_recursion()
        numbers = {name: number for number, name in enumerate(self._rules)}
        looping = [name for name in self._rules if name not in plain]
        self._parts = {name: _Part(f"r_{numbers[name]}", 1, False) for name in looping}
        size = 0
        for name in plain + looping:
            self._body, self._at = self._rules[name], 0
            part = self._alternatives()
            if self._at < len(self._body):
                raise self._fault("the name of a rule was expected")
            size += part.size
            if size > MAX_SIZE:
                raise BadGrammar(f"repeats more than {MAX_SIZE} times, all counts multiplied")
            reference = self._parts.setdefault(name, _Part(f"T_{numbers[name]}", part.size))
            self._lines.append(f"{reference.lark}: {part.lark}")
        return "\n".join([f"start: {self._parts['root'].lark}", *self._lines, ""])

    def _without_recursion(self) -> list[str]:
        """Return the rules that neither are recursive nor refer to such; each follows its parts."""
        uses = {
            name: {token.text for token in body if token.kind == "name"}
            for name, body in self._rules.items()
        }
        ended: dict[str, None] = {}
        while found := [name for name in uses if name not in ended and uses[name] <= ended.keys()]:
            ended |= dict.fromkeys(found)
        return list(ended)

    def _peek(self) -> _Token:
        if self._at < len(self._body):
            return self._body[self._at]
        return _Token("end", "its end", self._body[-1].line if self._body else 1)

    def _skip(self, mark: str) -> bool:
        is_there = self._peek().text == mark
        self._at += is_there
        return is_there

    def _fault(self, expected: str) -> BadGrammar:
        token = self._peek()
        return BadGrammar(f"line {token.line}: {expected}, not {token.text[:40]}")

    def _alternatives(self) -> _Part:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadGrammar(f"has groups nested deeper than {MAX_DEPTH} levels")
        sequences = [self._sequence()]
        while self._skip("|"):
            sequences.append(self._sequence())
        self._depth -= 1
        parts = list(itertools.chain(*sequences))
        is_terminal = all(part.is_terminal for part in parts)
        joined = _joined if is_terminal else self._with_terminals
        lark = " | ".join(joined(sequence) or '""' for sequence in sequences)
        return _Part(f"({lark})", sum(part.size for part in parts), is_terminal)

    def _with_terminals(self, sequence: list[_Part]) -> str:
        """Join parts; those between two recursive rules become a terminal of their own."""
        written = []
        for is_terminal, run in itertools.groupby(sequence, key=lambda part: part.is_terminal):
            lark = _joined(run)
            if is_terminal:
                name = f"A_{len(self._lines)}"
                self._lines.append(f"{name}: {lark}")
                lark = name
            written.append(lark)
        return " ".join(written)

    def _sequence(self) -> list[_Part]:
        parts: list[_Part] = []
        while self._peek().text not in (")", "|", "its end"):
            parts.append(self._repeated(self._item()))
        return parts

    def _item(self) -> _Part:
        token = self._peek()
        if token.kind == "count":
            raise BadGrammar(f"line {token.line}: {token.text} has nothing before it")
        self._at += 1
        if token.kind == "name":
            return self._parts[token.text]
        if token.kind == "mark":
            inner = self._alternatives()
            if not self._skip(")"):
                raise self._fault(") was expected")
            return inner
        regex = _literal(token) if token.kind == "string" else _class(token)
        escaped = regex.replace("/", "\\/")
        return _Part(f"/{escaped}/" if regex else '""', 1 + len(regex) // 16)

    def _repeated(self, item: _Part) -> _Part:
        token = self._peek()
        if token.kind != "count":
            return item
        self._at += 1
        if self._peek().kind == "count":
            raise BadGrammar(
                f"line {token.line}: of two counts in a row the inner one stands in parentheses"
            )
        numbers = [int(number) for number in re.findall(r"\d+", token.text)]
        if max(numbers, default=0) > MAX_TIMES or numbers != sorted(numbers):
            raise BadGrammar(f"line {token.line}: {token.text} is no count up to {MAX_TIMES}")
        count = re.sub(r"\s", "", token.text)
        return item._replace(lark=f"({item.lark}){count}", size=item.size * max([1, *numbers]))


def _joined(parts: Iterable[_Part]) -> str:
    return " ".join(part.lark for part in parts)


def _literal(token: _Token) -> str:
    """Return the regular expression of a string. Raises BadGrammar."""

    def unescaped(found: re.Match[str]) -> str:
        if code := found[1] or found[2] or found[3]:
            return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else "\ud800"
        if found[4] not in _PLAIN:
            raise BadGrammar(f"line {token.line}: the escape {found[0]} is not known")
        return _PLAIN[found[4]]

    text = _ESCAPE.sub(unescaped, token.text[1:-1])
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise BadGrammar(f"line {token.line}: half a character of UTF-16 is no text")
    return literal(text)


def _class(token: _Token) -> str:
    try:
        return whole_text(token.text)
    except BadPattern as error:
        raise BadGrammar(f"line {token.line}: {token.text[:40]} {error}") from error
