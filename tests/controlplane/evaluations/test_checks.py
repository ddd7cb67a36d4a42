"""Each check of an answer, and what a check may say."""

from __future__ import annotations

import time
from typing import Any

import pytest

from contract.training.row_messages import Row
from controlplane.errors import InvalidRequest
from controlplane.evaluations import checks
from controlplane.evaluations.asking import MAX_OUTPUT_CHARS
from controlplane.evaluations.leakage import digests_of_rows, prompt_digest

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("check", "output", "expected", "score"),
    [
        ({"type": "exact"}, " yes\n", "yes", 1.0),
        ({"type": "exact"}, "Yes", "yes", 0.0),
        ({"type": "contains"}, "it is 42 EUR", "42", 1.0),
        ({"type": "contains", "value": "USD"}, "it is 42 EUR", "42", 0.0),
        ({"type": "json_f1"}, '{"a": 1.0, "b": [1, 2]}', '{"a": 1, "b": [2, 1]}', 1.0),
        ({"type": "json_f1"}, '{"a": 1, "b": 3}', '{"a": 1, "b": 2}', 0.5),
        ({"type": "json_f1"}, '```json\n{"a": 1}\n```', '{"a": 1}', 1.0),
        ({"type": "json_f1"}, "no JSON", '{"a": 1}', 0.0),
        ({"type": "json_f1"}, '{"a": true}', '{"a": 1}', 0.0),
        ({"type": "json_f1"}, "[" * 100_000, '{"a": 1}', 0.0),
        ({"type": "json_schema", "schema": SCHEMA}, '{"a": 1}', "", 1.0),
        ({"type": "json_schema", "schema": SCHEMA}, '{"a": "1"}', "", 0.0),
        ({"type": "json_schema", "schema": {"multipleOf": 0.1}}, "0.3", "", 1.0),
        ({"type": "json_schema", "schema": {"multipleOf": 0.1}}, "0.35", "", 0.0),
        ({"type": "json_schema", "schema": {"type": "integer"}}, "2.0", "", 1.0),
        ({"type": "json_schema", "schema": {"const": 0.5}}, "0.50", "", 1.0),
        ({"type": "json_schema", "schema": {}}, "NaN", "", 0.0),
        ({"type": "json_schema", "schema": {}}, "9" * 5000, "", 0.0),
        ({"type": "regex", "pattern": "^[a-c]+$"}, "abc", "", 1.0),
        ({"type": "regex", "pattern": "^[a-c]+$"}, "abcd", "", 0.0),
        ({"type": "similarity"}, "The cat, sat", "the cat sat", 6 / 7),
        ({"type": "similarity", "by": "characters"}, "abcd", "ABCE", 0.5),
        ({"type": "similarity", "by": "characters"}, "", "abc", 0.0),
    ],
)
def test_scores(check: dict[str, Any], output: str, expected: str, score: float) -> None:
    [stored] = checks.checked([check], "checks", has_expected=bool(expected))
    [found] = checks.scores([stored], output, expected)
    assert found == pytest.approx(score)


@pytest.mark.parametrize(
    ("check", "param"),
    [
        ("exact", "checks.0.type"),
        ({"type": "magic"}, "checks.0.type"),
        ({"type": "exact", "value": "x"}, "checks.0.value"),
        ({"type": "regex"}, "checks.0.pattern"),
        ({"type": "regex", "pattern": "(a)\\1"}, "checks.0.pattern"),
        ({"type": "regex", "pattern": "("}, "checks.0.pattern"),
        ({"type": "json_schema", "schema": {"type": "odd"}}, "checks.0.schema"),
        ({"type": "json_schema", "schema": {"pattern": "(a*)*b"}}, "checks.0.schema"),
        ({"type": "similarity", "by": "meaning"}, "checks.0.by"),
        ({"type": "judge", "judge": "No Name"}, "checks.0.judge"),
    ],
)
def test_a_bad_check_is_refused_by_its_field(check: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checks.checked([check], "checks", has_expected=True)
    assert caught.value.param == param


def test_without_an_expected_answer_nothing_is_compared_with_it() -> None:
    for kind in ("exact", "contains", "json_f1", "similarity"):
        with pytest.raises(InvalidRequest):
            checks.checked([{"type": kind}], "checks", has_expected=False)


@pytest.mark.parametrize("pattern", ["(a*)*b", r"(.*){3}a.{800}b", r"\p{L}{90}[0-9]"])
def test_no_pattern_takes_long(pattern: str) -> None:
    began = time.process_time()
    assert not checks.is_found(pattern, "a" * MAX_OUTPUT_CHARS)
    assert time.process_time() - began < 10


def test_half_a_character_is_searched_too() -> None:
    assert checks.is_found("b$", "\ud800b")


def test_a_prompt_is_known_again_in_other_letters_and_below_another_system_message() -> None:
    row = [
        {"role": "system", "content": "You are a clerk."},
        {"role": "user", "content": "Total  of INVOICE 7?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "And of 8?"},
        {"role": "assistant", "content": "13"},
    ]
    known = set(digests_of_rows([Row(messages=tuple(row), learned=(2, 4))]))
    assert prompt_digest([{"role": "user", "content": "total of invoice\n7?"}]) in known
    assert prompt_digest(row[:4]) in known
    assert prompt_digest([{"role": "user", "content": "Total of invoice 8?"}]) not in known


def test_system_messages_count_where_no_user_speaks() -> None:
    row = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Hello!"}]
    (known,) = digests_of_rows([Row(messages=tuple(row), learned=(1,))])
    assert prompt_digest([{"role": "system", "content": "be  kind."}]) == known
    assert prompt_digest([{"role": "system", "content": "Be brief."}]) != known
