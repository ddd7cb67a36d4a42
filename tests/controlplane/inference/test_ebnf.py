"""Grammars of other servers' requests: what of them is read, and that it is what the decoder then
holds an answer to. The decoder's own library judges the texts."""

from __future__ import annotations

import functools
import time
from typing import Any

import llguidance
import pytest

from controlplane.inference.ebnf import MAX_CHARS, MAX_RULES, BadGrammar, to_lark


@functools.cache
def tokenizer() -> Any:
    """One token for each byte."""
    return llguidance.LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(
        tokenizer(), llguidance.grammar_from("lark", to_lark(grammar)), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CASES = {
    "lists": (
        'root ::= "SELECT " column (", " column)* # all of them\ncolumn ::= [a-z]+ | "*"',
        ["SELECT a, b", "SELECT *"],
        ["SELECT ", "SELECT A", "SELECT a,b"],
    ),
    "nested": (
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
        ["1+(2+3)", "((7))"],
        ["1+", "(", "(1"],
    ),
    "nothing": ('root ::= "" | "x" root', ["", "xx"], ["y"]),
    "stars": ('root ::= "a"*', ["", "aa"], ["b"]),
    "same beginnings": ('root ::= "a" "b" | "ab" "d"', ["ab", "abd"], ["a", "abdd"]),
    "ends as it goes on": ('root ::= [a-z]+ "a"', ["bca", "aa"], ["b", "a"]),
    "escapes": (
        'root ::= "\\u00e9\\x41" [^"\\\\\\n]{2,3} "/"',
        ["éAbc/", "éA]b[/"],
        ["éAb/", 'éA"b/'],
    ),
    "left recursion": ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
    "Lark, as it is": (
        '%import common.DIGIT\nstart: pair ("," pair)~1..2\npair: "a".."c" [DIGIT] // one\n',
        ["a1,b", "a,b,c3"],
        ["a", "d,a", "a,a,a,a"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grammar_says_what_it_says_elsewhere(case: str) -> None:
    grammar, good, bad = CASES[case]
    for text in good:
        assert accepts(grammar, text), (text, to_lark(grammar))
    for text in bad:
        assert not accepts(grammar, text), (text, to_lark(grammar))


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (" ", "is empty"),
        ('a ::= "x"', "no rule root"),
        ("root ::= x", "no rule x"),
        ('root ::= "a"\nroot ::= "b"', "two rules root"),
        ('root ::= "a', "line 1: the string has no end"),
        ('root ::= "b"\nc ::= ("a"', r"line 2: \) was expected"),
        ("root ::= *", "nothing before it"),
        ("root ::= 'a'", "line 1: this is no part of a grammar: \"'a'\""),
        ('root ::= "\\q"', "the escape"),
        ('root ::= "\\ud800"', "half a character"),
        ('root ::= "a"{9,2}', "no count"),
        ('root ::= "a"{5000}', "no count"),
        ('root ::= "a"**', "in parentheses"),
        ("root ::= [z-a]", "not a regular expression"),
        ("root ::= " + "(" * 60, "nested deeper"),
        ("root ::= " + "x" * MAX_CHARS, "the limit"),
        ('root ::= (("a"{1000}){1000}){1000}', "repeats more than"),
    ],
)
def test_what_is_not_read_is_refused_by_name(grammar: str, says: str) -> None:
    with pytest.raises(BadGrammar, match=says):
        to_lark(grammar)


def test_rules_that_double_are_refused_before_they_are_written_out() -> None:
    rules = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)]
    begun = time.process_time()
    with pytest.raises(BadGrammar, match="repeats more than"):
        to_lark("\n".join(["root ::= r0", *rules, 'r60 ::= "a"']))
    assert time.process_time() - begun < 1


def test_a_long_chain_of_rules_is_read() -> None:
    rules = [f"r{i} ::= r{i + 1}" for i in range(MAX_RULES - 2)]
    chain = "\n".join(["root ::= r0", *rules[:-1], f'r{MAX_RULES - 3} ::= "a"'])
    assert accepts(chain, "a")


def test_nothing_of_the_clients_text_is_read_as_lark() -> None:
    """Names, quotes and slashes of a client end no rule or expression of ours."""
    grammar = 'root ::= "/ \\n%json {} \\"<|im_end|>" T_0\nT_0 ::= [/"]'
    assert accepts(grammar, '/ \n%json {} "<|im_end|>/')
    assert to_lark(grammar).count("\n") == 3
