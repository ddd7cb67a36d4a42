"""Graders: what is refused by name, templates, formulas, and similarities computed slowly."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from contract.grading.formula import Formula
from contract.grading.graders import BadGrader, check_grader, num_models, paths_of
from contract.grading.templates import Missing, filled, sample_of
from contract.grading.text_metrics import METRICS, common_length, similarity
from contract.training.rewards import (
    Answer,
    Asked,
    BadRewards,
    Rewards,
    read_answers,
    take_rewards,
    write_answers,
    write_rewards,
)

LIKE: dict[str, Any] = {
    "type": "string_check", "name": "a", "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}", "operation": "like",
}  # fmt: skip
MODEL: dict[str, Any] = {
    "type": "score_model", "model": "judge:strict", "range": [0, 10],
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "{{ item.q[0].x }}"}]}],
    "sampling_params": {"temperature": 0, "max_completions_tokens": 16},
}  # fmt: skip
SIMILAR: dict[str, Any] = {"type": "text_similarity", "input": "", "reference": ""}
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return 1"}
MULTI: dict[str, Any] = {
    "type": "multi", "name": "all", "graders": {"a": LIKE, "b": MODEL, "c": PYTHON},
    "calculate_output": "min(a, 1) * 0.5 + b / 10 ^ 1 - -c",
}  # fmt: skip


def test_good_graders_are_taken() -> None:
    similar = {**LIKE, "type": "text_similarity", "evaluation_metric": "rouge_l"}
    del similar["operation"]
    for grader in (LIKE, MODEL, PYTHON, MULTI, similar | {"pass_threshold": 0.5}):
        check_grader(grader)
    assert paths_of(MULTI) == ["item.answer", "item.q[0].x"]
    assert (num_models(MULTI), num_models(LIKE)) == (1, 0)


@pytest.mark.parametrize(
    ("grader", "field", "told"),
    [
        ([], "grader.type", "must be one of"),
        ({"type": "label_model"}, "grader.type", "write it as score_model"),
        (LIKE | {"weight": 1}, "grader.weight", "is no field of a grader of type string_check"),
        (LIKE | {"reference": None}, "grader.reference", "is missing"),
        (LIKE | {"operation": "re"}, "grader.operation", "must be one of eq, ne, like, ilike"),
        (LIKE | {"input": "{{ x }}"}, "grader.input", "must name item.… or sample.…"),
        (LIKE | {"input": "{{ sample.output_tools }}"}, "grader.input", "a sample has output_text"),
        (LIKE | {"input": "x" * 70_000}, "grader", "must have at most 65536 characters"),
        (
            SIMILAR | {"evaluation_metric": "cosine"},
            "grader.evaluation_metric",
            "there are no embeddings",
        ),
        (MODEL | {"input": [{"role": "x", "content": ""}]}, "grader.input.0.role", "must be one"),
        (
            MODEL | {"input": [{"role": "user", "content": {"type": "input_image"}}]},
            "grader.input.0.content",
            "must be text",
        ),
        (MODEL | {"range": [1, 0]}, "grader.range", "the lower one first"),
        (MODEL | {"sampling_params": {"x": 1}}, "grader.sampling_params.x", "is none of"),
        (PYTHON | {"image_tag": "v1"}, "grader.image_tag", "standard library alone"),
        (PYTHON | {"source": "x = 1"}, "grader.source", "must define grade(sample, item)"),
        (MULTI | {"graders": {"a": MULTI}}, "grader.graders.a.type", "must be one of"),
        (MULTI | {"graders": {"a b": LIKE}}, "grader.graders.a b", "letters, digits and _"),
        (MULTI | {"calculate_output": "d"}, "grader.calculate_output", "none of its graders"),
    ],
)  # fmt: skip
def test_wrong_graders_are_refused_by_the_field(grader: Any, field: str, told: str) -> None:
    with pytest.raises(BadGrader) as caught:
        check_grader(grader)
    assert caught.value.field == field and told in caught.value.problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.25 * a + 0.75 * b", 1.75),
        ("max(a, b, 0) ^ 2", 4),
        ("-(a - b) / 2 + abs(-1)", 1.5),
        ("floor(1.5) + ceil(0.2) + sqrt(4) + exp(0) + log(a)", 5),
    ],
)
def test_formulas(text: str, value: float) -> None:
    assert Formula(text, ("a", "b")).value({"a": 1.0, "b": 2.0}) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a +", "a.b", "a[0]", "__import__('os')", "open(a)", "lambda: a", "a if b else a"),
        *("'a'", "True", "max(a)", "abs(a, b)", "min(*a)", "a // b", "a % b", "(" * 60 + ")" * 60),
        *("a = 1", "-" * 50 + "a", "+".join("a" * 501), "a + 1" + "0" * 400),
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Formula(text, ("a", "b"))


@pytest.mark.parametrize("text", ["a / 0", "log(0 - a)", "9 ^ 9 ^ 9", "sqrt(-1)", "exp(1000)"])
def test_a_formula_without_a_value_says_so(text: str) -> None:
    with pytest.raises((ArithmeticError, ValueError)):
        Formula(text, ("a",)).value({"a": 1.0})


def test_templates() -> None:
    item = {"q": [{"x": 3}, "two"], "answer": "7", "none": None}
    values = {"item": item, "sample": sample_of('{"total": 7}')}
    for text, wanted in (
        ("{{item.answer}}-{{ item.q[0].x }}", "7-3"),
        ("{{ sample.output_json.total }}", "7"),
        ("{{ item.q }}", '[{"x": 3}, "two"]'),
        ("{ item.answer } {{ item.none }}", "{ item.answer } null"),
    ):
        assert filled(text, values) == wanted
    for text in ("{{ item.no }}", "{{ item.q[2] }}", "{{ item.answer.x }}", "{{ item.q.x }}"):
        with pytest.raises(Missing):
            filled(text, values)
    for text in ("no json", "NaN", "[" * 100_000):
        assert sample_of(text)["output_json"] is None


def slow_common(one: str, other: str) -> int:
    best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, j in itertools.product(range(len(one)), range(len(other))):
        best[i + 1][j + 1] = (
            best[i][j] + 1 if one[i] == other[j] else max(best[i][j + 1], best[i + 1][j])
        )
    return best[-1][-1]


def test_the_longest_common_subsequence_is_the_slow_one() -> None:
    drawn = random.Random(5)
    for _ in range(200):
        one, other = ("".join(drawn.choices("abcd", k=drawn.randrange(90))) for _ in range(2))
        assert common_length(one, other) == slow_common(one, other)


def test_similarities() -> None:
    assert similarity("rouge_5", "xyz", "the cat sat") == 0
    for metric in METRICS:
        same = "the cat sat on the mat today"
        assert similarity(metric, same, same) == pytest.approx(1), metric
        assert similarity(metric, "", "") == 1, metric
        assert similarity(metric, "xyz", "the cat sat") < 0.35, metric
    text, reference = "the cat the cat on the mat", "the cat is on the mat"
    assert similarity("rouge_1", text, reference) == pytest.approx(2 * 5 / 13)
    assert similarity("rouge_2", text, reference) == pytest.approx(2 * 3 / 11)
    assert similarity("rouge_l", text, reference) == pytest.approx(2 * 5 / 13)
    assert similarity("gleu", text, reference) == pytest.approx((5 + 3 + 1 + 0) / (7 + 6 + 5 + 4))
    precisions = 5 / 7 * 4 / 7 * 2 / 6 * 1 / 5
    assert similarity("bleu", text, reference) == pytest.approx(precisions**0.25)
    assert similarity("fuzzy_match", "kitten", "sitting") == pytest.approx(2 * 4 / 13)


def test_rewards_come_by_files(tmp_path: Path) -> None:
    asked = Asked(3, 2, [Answer(1, "a"), Answer(1, "b", True)], is_validation=True)
    path = write_answers(tmp_path, asked)
    assert read_answers(path) == asked and take_rewards(tmp_path, asked) is None
    write_rewards(tmp_path, asked, Rewards([0.5, 1], {"reward_a": 0.75}))
    assert take_rewards(tmp_path, asked) == Rewards([0.5, 1.0], {"reward_a": 0.75})
    assert list(tmp_path.iterdir()) == []
    wrong: Any
    for wrong in (
        {"rewards": [1]}, {"rewards": [1, "x"], "figures": {}}, {"rewards": [1, 2]}, [],
        {"rewards": [1, float("nan")], "figures": {}},
    ):  # fmt: skip
        (tmp_path / "rewards-3-validation.json").write_text(json.dumps(wrong))
        with pytest.raises(BadRewards):
            take_rewards(tmp_path, asked)
