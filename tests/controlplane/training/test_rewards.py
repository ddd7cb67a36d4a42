"""A run by reinforcement from its prompts to its version: real child, real graders, real store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.adapters.models import BaseModel
from controlplane.errors import ApiError, InvalidRequest, Unavailable
from controlplane.evaluations.rewards import grading as run_graders
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import TrainingRun
from controlplane.training.runs import execution, running
from controlplane.training.runs import services as run_services
from controlplane.training.runs.rewards import grading
from controlplane.usage.limits import quotas
from tests.controlplane.conftest import Party
from tests.controlplane.training.test_batch import make_run
from tests.controlplane.training.test_execution import trainers

pytestmark = pytest.mark.django_db(transaction=True)
PROMPTS = b"".join(
    json.dumps(
        {"messages": [{"role": "user", "content": f"hello {number}"}], "wanted": "o"}
    ).encode()
    + b"\n"
    for number in range(40)  # so many that a share of them leaves enough on both sides
)
LIKE = {
    "type": "string_check", "name": "has", "input": "{{ sample.output_text }}",
    "reference": "{{ item.wanted }}", "operation": "ilike",
}  # fmt: skip
HYPER: dict[str, Any] = {
    "method": "reinforcement", "grader": LIKE, "samples": 4, "max_tokens": 6, "max_steps": 3,
    "learning_rate": 0.05, "batch_size": 4, "warmup_steps": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(grading, "_FIRST_PAUSE_S", 0.01)


def trained(party: Party, **hyper: Any) -> TrainingRun:
    run = make_run(party, PROMPTS, **HYPER | hyper)
    execution.training_next()
    with tenant_scope(party.tenant.id):
        run.refresh_from_db()
    return run


def test_a_run_is_graded_and_becomes_a_version(acme: Party) -> None:
    run = trained(acme, validation_share=0.3, eval_steps=2)
    with tenant_scope(acme.tenant.id):
        assert (run.status, run.error) == ("succeeded", "")
        assert run.version is not None and run.version.number == 1
        steps = list(
            run.events.filter(kind="metrics").order_by("pk").values_list("data", flat=True)
        )
    assert [each["step"] for each in steps] == [1, 2, 3]
    for each in steps:
        assert 0 <= each["reward"] <= 1 and each["mismatch_share"] == 0 and each["entropy"] > 0
        assert [set(sample) for sample in each["samples"]] == [{"line", "answer", "reward"}] * 3
        for sample in each["samples"]:
            assert sample["reward"] == float("o" in sample["answer"].casefold())
    assert steps[1]["valid_loss"] == -steps[1]["validation_reward"]
    assert run.progress["grading_s"] > 0 and run.progress["samples"]


def test_a_run_whose_trainer_was_killed_makes_the_same_steps(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    def figures(run: TrainingRun) -> list[Any]:
        with tenant_scope(acme.tenant.id):
            found = run.events.filter(kind="metrics").order_by("pk")
            return [(d["step"], d["reward"], d["kl"], d["samples"]) for d in
                    found.values_list("data", flat=True)]  # fmt: skip

    whole = figures(trained(acme))
    kills = _Kills(at=2)
    monkeypatch.setattr(grading, "graders", lambda: [kills])
    run = trained(acme)
    assert (run.status, run.attempts, kills.calls) == ("queued", 1, 2)
    execution.training_next()
    with tenant_scope(acme.tenant.id):
        run.refresh_from_db()
    assert (run.status, run.attempts, kills.calls) == ("succeeded", 2, 5)
    assert figures(run) == whole and len(whole) == 3


class _Kills:
    """A grader that kills the trainer while it waits."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def grade(self, run: Any, grader: Any, samples: Sequence[Any]) -> Any:
        self.calls += 1
        if self.calls == self.at:
            for child in trainers():
                child.kill()
        return run_graders.RunGrader().grade(run, grader, samples)


def test_a_row_without_what_the_grader_takes_is_named(acme: Party) -> None:
    grader = LIKE | {"reference": "{{ item.answer.total }}"}
    run = trained(acme, grader=grader)
    assert run.status == "failed"
    assert run.error == "line 1 has no answer.total, which the grader takes"


class _Fails:
    """A grader that fails some times."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def grade(self, run: Any, grader: Any, samples: Sequence[Any]) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return run_graders.RunGrader().grade(run, grader, samples)


def test_graders_are_asked_again_when_they_may_answer_later(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = _Fails(Unavailable("away"), Unavailable("away"))
    monkeypatch.setattr(grading, "graders", lambda: [fails])
    assert trained(acme, max_steps=1).status == "succeeded" and fails.calls == 3
    fails.errors = [InvalidRequest("There is no such judge.")]
    run = trained(acme, max_steps=1, seed=1)
    assert (run.status, run.error) == ("failed", "There is no such judge.")
    assert run.error_param == "hyperparameters.grader"
    fails.errors = [ZeroDivisionError()]  # a defect of ours
    run = trained(acme, max_steps=1, seed=2)
    assert (run.status, run.error_code) == ("failed", "server_error")


def test_grading_has_a_limit_of_seconds(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        quotas.quota_set(grading_seconds=0)
    run = trained(acme)
    assert (run.status, run.error_code) == ("failed", "grading_too_long")


def test_answers_and_calls_have_limits(acme: Party) -> None:
    make_run(acme, PROMPTS, **HYPER)
    asked: dict[str, Any] = {"adapter_name": "greeter", "dataset_name": "chats"}
    model = {"type": "score_model", "model": "x", "input": [{"role": "user", "content": "?"}]}
    with tenant_scope(acme.tenant.id):
        quotas.quota_set(training_samples=47)
        for hyper, told in (
            (HYPER, r"would sample 48 answers .*limit is 47"),
            (HYPER | {"grader": model, "max_steps": 2}, r"ask models for 32 scores .*limit is 31"),
        ):
            with pytest.raises(InvalidRequest, match=told) as caught:
                run_services.training_run_create(**asked, hyperparameters=hyper)
            assert caught.value.code == "training_too_long"
            quotas.quota_set(grader_calls=31)


def test_a_grader_that_names_no_judge_of_the_tenant_is_refused(acme: Party) -> None:
    make_run(acme, PROMPTS, **HYPER)
    judge = {
        "type": "score_model",
        "model": "judge:none",
        "input": [{"role": "user", "content": ""}],
    }
    checks = {"type": "checks", "checks": [{"type": "regex", "pattern": "(?<=a)b"}]}
    expected = {"type": "checks", "checks": [{"type": "json_f1"}]}
    with tenant_scope(acme.tenant.id):
        for grader, param in (
            (judge, "grader.model"),
            (checks, "grader.checks.0.pattern"),
            (expected, "grader.checks.0"),
            (
                {"type": "multi", "graders": {"a": judge}, "calculate_output": "a"},
                "grader.graders.a.model",
            ),
        ):
            with pytest.raises(ApiError) as caught:
                run_services.training_run_create(
                    adapter_name="greeter",
                    dataset_name="chats",
                    hyperparameters=HYPER | {"grader": grader},
                )
            assert caught.value.param == f"hyperparameters.{param}"


def test_rows_are_found_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n\n{"a": 3}')
    rows = grading._Rows(path)
    assert rows.item(3) == {"a": 3} and rows.item(1) == {"a": 1}
