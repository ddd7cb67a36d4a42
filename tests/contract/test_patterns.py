r"""Patterns mean what ECMA-262 says, to the check of answers (RE2) and to the decoder (llguidance).

The tables were made with Node's RegExp; where there is a Node, it is asked again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import llguidance
import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st

from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import Pattern, other_than, read_pattern, texts_of, whole_text

NODE = shutil.which("node")
GRIN = "\U0001f600"


class Case(NamedTuple):
    pattern: str
    found: tuple[str, ...]
    missed: tuple[str, ...]
    flag: str = "u"


CASES = [
    Case(r"^(?<y>[0-9]{4})$", ("2024",), ("202",)),
    Case(r"^(?<y>a)|(?<$z>b)$", ("ax", "xb"), ("x",)),
    Case(r"^\p{L}{3}$", ("abc", "日本語", "éàü"), ("ab1", "ab")),
    Case(r"^\P{L}$", ("1", GRIN), ("é",)),
    Case(r"^[\p{Lu}\p{Nd}_]+$", ("É_٣",), ("é",)),
    Case(r"^[^\P{L}a-z]$", ("A", "é"), ("a", "1")),
    Case(r"^\p{gc=Decimal_Number}\p{General_Category=Letter}\p{Sc}$", ("3a€",), ("aa€",)),
    Case(r"^\p{LC}\p{Any}\p{ASCII}\p{Assigned}$", ("aéab",), ("1éab", "aééb")),
    Case(r"^\d\D\w\W$", ("1a_ ", "1٣aé"), ("٣a_ ", "1aé ")),
    Case(r"^\s$", ("\ufeff", "\u00a0", "\u2028", "\t"), ("\x85", "\x1c", "\u200b")),
    Case(r"^\S$", ("\x85", "\x1c", "\u200b"), ("\ufeff", "\u2003")),
    Case(r"^[\s\S]$", ("\n", "\ufeff", "\x85", GRIN), ("",)),
    Case(r"^.$", ("\x85", "\v", GRIN), ("\n", "\r", "\u2028", "\u2029")),
    Case(r"^[^]$", ("\n", GRIN), ("",)),
    Case(r"^a$", ("a",), ("a\n", "\na")),
    Case("^[\U0001f600-\U0001f64f]$", (GRIN,), ("\U0001f650", "a")),
    Case(r"^\u{1F600}\u{000061}$", (GRIN + "a",), ("aa",)),
    Case(r"^[\ud83d\ude00\u00e9]$", (GRIN, "é"), ("a",)),
    Case(r"^\x41\u0042\cJ\0\t\v\f\r$", ("AB\n\0\t\v\f\r",), ("AB",)),
    Case(r"^\/\.\$\^\{\}\[\]\(\)\|\*\+\?\\$", (r"/.$^{}[]()|*+?\\"[:-1],), ("",)),
    Case(r"^[\b\-\]]$", ("\b", "-", "]"), ("b",)),
    Case(r"^[--0]$", (".", "0"), ("1",)),
    Case(r"^[a&&b~~c]$", ("a", "&", "~"), ("d",)),
    Case(r"^a??b*?c+?d{2,3}?$", ("bcdd", "acccddd"), ("acd",)),
    Case(r"^(?:|a)(b|)$", ("", "ab"), ("ba",)),
    Case(r"\bfoo\B", ("a foos",), ("afoos", "foo")),
    Case(r"^é\b", (), ("é", "é ")),
    # Errors with the flag u; without it they are text (Annex B).
    Case(r"^a{,3}$", ("a{,3}",), ("", "aaa"), ""),
    Case(r"^a\Z$", ("aZ",), ("a",), ""),
    Case(r"^\A\z\a\e\h$", ("Azaeh",), ("",), ""),
    Case(r"^[\w-.]+@\-\_\ \'\"\:$", ("a-.@-_ '\":",), ("",), ""),
    Case(r"^]}{x{1$", ("]}{x{1",), ("",), ""),
    Case(r"^\pL\p$", ("pLp",), ("ap",), ""),
    Case(r"^\x4\u12$", ("x4u12",), ("",), ""),
    Case(r"^\c[\c1\c]$", ("\\c\x11", "\\cc"), ("c",), ""),
]
INVALID = [
    "(?P<y>a)", "(?P=y)", "(?#x)", "(?>a)", "(?(1)a)", "a++", "a**", "*a", "^*", "a{2}{3}", "{2}",
    "a{3,2}", "(", ")", "(?:a", "[a", "[z-a]", "\\", r"\u{110000}", r"\u{}", r"\p{L", r"\1",
    r"(a)\2", r"\01", r"\8", r"[\1]", r"\k<y>", "(?<y>a)(?<y>b)", "(?<1y>a)", "(?<y", "(?ii:a)",
    r"\b+",
]  # fmt: skip
#: Valid, and refused by name: they need more than an automaton, or data that is not here.
UNSUPPORTED = {
    "^(?=a)b": "looks ahead",
    "a(?!b)": "looks ahead",
    "(?<=a)b": "looks ahead or behind",
    "(?<!a)b": "looks ahead or behind",
    r"(a)\1": "refers back",
    r"(?<y>a)\k<y>": "refers back",
    r"\p{Script=Greek}": r"\p{Script=Greek}, which is not known",
    "(?:(?:a{10}){10}){11}": "repeats more than 1000 times",
    r"[^\d]{1001}": "repeats more than 1000 times",
    r"\p{L}{999}": "large classes",
    r"\p{L}" * 17: "more than 16 times",
    "a" * 257: "has 257 characters",
    "[]": "no character",
}


def is_found_by_re2(pattern: Pattern, text: str) -> bool:
    return re2.search(pattern.search, text) is not None


def decoder_takes(regex: str, text: str) -> bool:
    """Whether the decoder's engine reads a text under a pattern of a whole string."""
    schema = json.dumps({"type": "string", "pattern": f"^{regex}$"})
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.grammar_from("json_schema", schema)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    answer = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    ids = tokenizer.tokenize_bytes(answer.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.pattern))
def test_a_pattern_means_to_every_engine_what_ecma_says(case: Case) -> None:
    pattern = read_pattern(case.pattern)
    for text in case.found + case.missed:
        assert is_found_by_re2(pattern, text) == (text in case.found), text
        if pattern.whole is not None:
            assert decoder_takes(pattern.whole, text) == (text in case.found), text


@pytest.mark.parametrize("pattern", INVALID)
def test_what_is_no_pattern_of_ecma_is_invalid(pattern: str) -> None:
    with pytest.raises(BadPattern, match="is not a regular expression of ECMA-262") as caught:
        read_pattern(pattern)
    assert caught.value.is_invalid


@pytest.mark.parametrize("pattern", UNSUPPORTED, ids=lambda pattern: pattern[:20])
def test_what_no_automaton_can_follow_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(BadPattern) as caught:
        read_pattern(pattern)
    assert UNSUPPORTED[pattern] in str(caught.value) and not caught.value.is_invalid


PARTS = (
    *(case.pattern for case in CASES), *INVALID, *UNSUPPORTED, *".^$|()[]{}*+?-,\\/ab3é", "(?:",
    "{2}", "{,3}", "[^", r"\d", r"\W", r"\b", r"\Z", r"\u{61}", r"\cJ", r"\k", r"[\w-.]", "[^]",
)  # fmt: skip
TEXTS = (
    "", "a", "b", "aa", "ab", "Z", "aZ", "a{,3}", "3", "33", "-", "é", GRIN, "\n", "a\n", "\ufeff",
    "\x85", "_", "\\", "c", "k", "}", "]", "{", "^", "$", "/", "\u2028", ".", ",", "|",
)  # fmt: skip


@st.composite
def patterns(draw: st.DrawFn) -> str:
    inner = "".join(draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4)))
    return f"^{inner}$" if draw(st.booleans()) else inner


@given(pattern=patterns())
def test_whatever_is_accepted_can_be_searched_and_means_the_same_whole(pattern: str) -> None:
    try:
        read = read_pattern(pattern)
    except BadPattern:
        return
    for text in TEXTS:
        found = is_found_by_re2(read, text)
        if read.whole is not None:
            assert (re2.fullmatch(read.whole, text) is not None) == found
    texts = texts_of(pattern, 40)
    if texts is not None:
        assert all(is_found_by_re2(read, text) for text in texts)
        assert [t for t in TEXTS if is_found_by_re2(read, t)] == [t for t in TEXTS if t in texts]


@pytest.mark.skipif(NODE is None, reason="there is no Node")
def test_node_agrees() -> None:
    """With the flag u where that reads the pattern, else without: as Annex B."""
    asked = [[case.pattern, case.flag, case.found + case.missed] for case in CASES]
    refused = [*INVALID, *UNSUPPORTED]
    told = ask_node({"cases": asked, "refused": refused})
    for case, found in zip(CASES, told["cases"], strict=True):
        assert found == [text in case.found for text in case.found + case.missed], case.pattern
    is_valid = dict(zip(refused, told["refused"], strict=True))
    assert not any(is_valid[pattern] for pattern in INVALID)
    assert all(is_valid[pattern] for pattern in UNSUPPORTED)


def ask_node(asked: dict[str, Any]) -> Any:
    script = """
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
const read = (pattern, flag) => { try { return new RegExp(pattern, flag) } catch { return null } };
const cases = asked.cases.map(([pattern, flag, texts]) => {
  if (!flag && read(pattern, "u")) throw new Error("valid with the flag u: " + pattern);
  return texts.map((text) => read(pattern, flag).test(text));
});
const refused = asked.refused.map((pattern) => read(pattern, "u") !== null);
console.log(JSON.stringify({ cases, refused }));
"""
    assert NODE is not None
    ended = subprocess.run(
        [NODE, "-e", script], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    "pattern, texts",
    [
        ("^score$", ["score"]),
        ("^(a|b)c?$", ["a", "ac", "b", "bc"]),
        ("^[ab]{1,2}$", ["a", "b", "aa", "ab", "ba", "bb"]),
        ("^x$|^y$|^x$", ["x", "y"]),
        ("^(?:){0,1000}$", [""]),
        ("^a", None),
        ("a", None),
        ("^a*$", None),
        ("^[0-9]{3}$", None),
        (r"^a\b$", None),
    ],
)
def test_the_texts_of_a_pattern_are_listed_if_they_are_few(
    pattern: str, texts: list[str] | None
) -> None:
    assert texts_of(pattern, 100) == texts


def test_a_whole_text_has_no_anchor_inside() -> None:
    assert re2.fullmatch(whole_text(r"^\d{2}|(?<y>x)"), "x")
    with pytest.raises(BadPattern, match="anchor or a word boundary inside"):
        whole_text(r"a\b")


def test_every_text_but_some() -> None:
    expression = other_than(["a", "ab", ""])
    assert [t for t in ("", "a", "ab", "abc", "b", "\n") if re2.fullmatch(expression, t)] == [
        "abc",
        "b",
        "\n",
    ]


def test_the_categories_are_the_interpreters() -> None:
    """An answer's characters are those of one version of Unicode, at the door and in the worker."""
    import unicodedata

    found = read_pattern(r"^\p{Lu}$")
    for code in range(0, sys.maxunicode, 97):
        if not 0xD800 <= code <= 0xDFFF:
            is_upper = unicodedata.category(chr(code)) == "Lu"
            assert is_found_by_re2(found, chr(code)) == is_upper
