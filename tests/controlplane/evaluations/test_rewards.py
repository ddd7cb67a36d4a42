"""The graders of runs by reinforcement: sealed Python, checks, judges, models, formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from contract.grading import python_process
from controlplane.errors import ApiError, InvalidRequest
from controlplane.evaluations import asking, judge
from controlplane.evaluations.rewards import scoring
from controlplane.evaluations.rewards.grading import RunGrader
from controlplane.infra.outbound import outbound
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.runs.rewards.grading import Graded, Sample
from tests.controlplane.conftest import Party

SAMPLES = [
    Sample('{"total": 7, "currency": "EUR"}', {"answer": {"total": 7, "currency": "EUR"}}),
    Sample('{"total": 8, "currency": "EUR"}', {"answer": {"total": 7, "currency": "EUR"}}),
    Sample("seven", {"answer": {"total": 7, "currency": "EUR"}}),
]
ANY_RUN: Any = None


def graded(grader: dict[str, Any], samples: list[Sample] = SAMPLES) -> Graded:
    return RunGrader().grade(ANY_RUN, grader, samples)


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "name": "own", "source": source}


def test_texts_checks_and_formulas() -> None:
    total = {"type": "string_check", "input": "{{ sample.output_json.total }}",
             "reference": "{{ item.answer.total }}"}  # fmt: skip
    assert graded(total | {"operation": "eq"}).rewards.rewards == [1, 0, 0]
    assert graded(total | {"operation": "ne"}).rewards.rewards == [0, 1, 0]
    upper = {**total, "input": "{{ sample.output_text }}", "reference": "SEVEN"}
    assert graded(upper | {"operation": "ilike"}).rewards.rewards == [0, 0, 1]
    assert graded(upper | {"operation": "like"}).rewards.rewards == [0, 0, 0]
    schema = {"type": "object", "required": ["total"]}
    valid = {"type": "checks", "checks": [{"type": "json_schema", "schema": schema}]}
    assert graded(valid).rewards.rewards == [1, 1, 0]
    fields = {"type": "checks", "checks": [{"type": "json_f1"}], "expected": "{{ item.answer }}"}
    assert graded(fields).rewards.rewards == [1, 0.5, 0]
    multi = {"type": "multi", "graders": {"valid": valid, "fields": fields},
             "calculate_output": "0.5 * valid + fields / valid"}  # fmt: skip
    found = graded(multi)
    assert found.rewards.rewards == [1.5, 1.0, 0.0]
    assert found.rewards.figures == {"reward_valid": 2 / 3, "reward_fields": 0.5}
    assert found.problem.startswith("calculate_output has no value: float division")


def test_python_gets_the_sample_and_the_item_and_the_standard_library() -> None:
    source = """
import math, re
def grade(sample, item):
    print("x" * 10_000_000)
    found = re.search(r"total.: (\\d+)", sample["output_text"])
    return math.floor(float(found[1])) / item["answer"]["total"] if found else -1
"""
    assert graded(python(source)).rewards.rewards == [1, 8 / 7, -1]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("while item: pass", "takes more than 2 s of CPU time"),
        ("return len(bytearray(10**10))", "MemoryError"),
        ("import socket; socket.socket()", "Error"),
        ("return len(open('/etc/passwd').read())", "Error"),
        ("import os; os.write(1, b'x' * (1 << 22)); return 1", "ended"),
        ("raise SystemExit(0)", "SystemExit"),
        ("return float('nan')", "nan is not finite"),
        ("import os; os._exit(0)", "ended"),
    ],
)
def test_what_a_source_may_not_do_costs_its_samples_alone(
    body: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_CPU_S", 2)
    source = f"def grade(sample, item):\n  if 'seven' != sample['output_text']: return 1\n  {body}"
    found = graded(python(source))
    assert found.rewards.rewards == [1, 1, 0]
    assert found.rewards.figures == {"grader_errors": 1}
    assert told in found.problem, found.problem


def test_without_seccomp_no_source_runs() -> None:
    assert python_process._may_signal()
    found = python_process.grade_samples({"source": "raise SystemExit"}, [])
    with pytest.raises(InvalidRequest, match="has no seccomp"):
        scoring._read(found, 3)


def test_a_source_that_does_not_load_gives_nothing() -> None:
    found = graded(python("def grade(sample, item): return 1\nimport numpy"))
    assert found.rewards.rewards == [0, 0, 0] and found.rewards.figures == {"grader_errors": 3}
    assert "ModuleNotFoundError" in found.problem or "PermissionError" in found.problem


@pytest.fixture
def strict(acme: Party, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Make a judge that answers what it is told to; the bodies that it gets."""
    bodies: list[Any] = []

    def make(answer: str) -> list[Any]:
        def called(url: str, headers: dict[str, str], body: bytes) -> bytes:
            bodies.append(json.loads(body))
            return json.dumps({"choices": [{"message": {"content": answer}}]}).encode()

        monkeypatch.setattr(judge, "_called", called)
        monkeypatch.setattr(outbound, "check", lambda url: None)
        with tenant_scope(acme.tenant.id):
            judge.judge_set(
                name="strict",
                url="https://judge.example/v1",
                model="m",
                by=asking.principal_of(acme.tenant),
            )
        return bodies

    return make


SCORE: dict[str, Any] = {
    "type": "score_model", "model": "judge:strict", "range": [0, 5],
    "input": [{"role": "user", "content": "Grade {{ sample.output_text }}"}],
}  # fmt: skip


@pytest.mark.django_db
def test_a_judge_scores_within_its_range(acme: Party, strict: Callable[[str], list[Any]]) -> None:
    bodies = strict("Steps: 1, 2. Score: 4.5")
    with tenant_scope(acme.tenant.id):
        assert graded(SCORE).rewards.rewards == [4.5] * 3
        asked = {each["messages"][0]["content"] for each in bodies}
        assert "Grade seven\n\nReply with one number from 0 to 5, and nothing else." in asked
        assert {each["max_tokens"] for each in bodies} == {256}
        strict("6")
        found = graded(SCORE)
        assert found.rewards.rewards == [0] * 3 and "no number from 0 to 5" in found.problem
        checked = {"type": "checks", "checks": [{"type": "judge", "judge": "strict"}]}
        assert graded(checked).rewards.rewards == [0.6] * 3


@pytest.mark.django_db
def test_a_judge_that_fails_is_asked_again_or_never(
    acme: Party, strict: Callable[[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict("1")

    def refuses(*_: Any) -> bytes:
        raise judge.JudgeFailed("It answered 401.", is_final=is_final)

    monkeypatch.setattr(judge, "_called", refuses)
    with tenant_scope(acme.tenant.id):
        for is_final in (True, False):
            with pytest.raises(ApiError, match="A judge failed: It answered 401") as caught:
                graded(SCORE)
            assert (caught.value.status >= 500) == (not is_final)
            assert isinstance(caught.value, InvalidRequest) == is_final


def test_a_models_number_is_the_last_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from controlplane.evaluations.rewards import grading

    class _Caller:
        class model:
            name = "support@2"

    class _Run:
        tenant = None

    bodies: list[Any] = []

    def texts(caller: Any, asked: list[Any]) -> list[str]:
        bodies.extend(asked)
        return ["0.25", "It is 1 of 2: 0.5", "none"]

    monkeypatch.setattr(asking, "principal_of", lambda tenant: None)
    monkeypatch.setattr(asking, "caller_of", lambda principal, model: _Caller)
    monkeypatch.setattr(asking, "texts", texts)
    run: Any = _Run()
    part = {**SCORE, "model": "support", "range": None}
    found = grading.RunGrader().grade(run, part, SAMPLES)
    assert found.rewards.rewards == [0.25, 0.5, 0.0]
    assert found.rewards.figures == {"grader_errors": 1}
    assert "support: It gave no number from 0 to 1" in found.problem
    assert bodies[0].model == "support@2" and bodies[0].temperature == 0
