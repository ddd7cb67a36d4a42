"""A gate whose expected answers were scored by the batch that trained the version."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from contract.training import judging
from contract.training.judging import Given, Score
from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.evaluations import asking, batch_scores, gate, suites
from controlplane.evaluations.asking import Asked
from controlplane.evaluations.batch_scores import GateJudge
from controlplane.evaluations.comparison import pair_of, paired
from controlplane.evaluations.models import BatchScores, Case, Evaluation, GateDecision, Result
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events
from tests.controlplane.conftest import Party
from tests.controlplane.evaluations.conftest import (
    NUM_CASES,
    Skill,
    add_version,
    begin,
    cases,
)
from tests.controlplane.evaluations.test_gate import live, run_all

#: Two rows that no case has.
ROW = b"\n".join(
    json.dumps(
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": "x"}]}
    ).encode()
    for word in ("one", "two")
)
Status = GateDecision.Status


@pytest.fixture
def asked(pool: dict[str, Skill], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Which model was asked for each answer, and whether for the score, too: as `asking` does."""
    seen: list[tuple[str, bool]] = []
    ask = asking.ask

    def listen(
        evaluation: Evaluation, caller: Any, cases: Sequence[Case], is_held: Any
    ) -> list[Asked]:
        is_scored = evaluation.scored_in is None
        seen.extend((evaluation.model, is_scored) for _ in cases)
        answers = ask(evaluation, caller, cases, is_held)
        if is_scored:
            return answers
        return [dataclasses.replace(each, logprob=None, num_tokens=0) for each in answers]

    monkeypatch.setattr(asking, "ask", listen)
    for number in range(1, 5):
        pool[f"invoices@{number}"] = lambda case: True
    return seen


def trained(
    adapter: Adapter,
    candidate: Sequence[Score] = ((-1.0, 4),) * NUM_CASES,
    of_live: Sequence[Score] = ((-2.0, 4),) * NUM_CASES,
    *,
    given: dict[str, str] | None = None,
    **changes: str,
) -> TrainingRun:
    """A run whose version is ready, and what its batch scored is kept."""
    adapter.refresh_from_db()
    suite_version = suites.suite_version_get(suite=suites.suite_get(name="totals"))
    assert adapter.live_version is not None
    stated = {
        "suite_version": str(suite_version.pk),
        "live_digest": adapter.live_version.digest,
        "base_revision": adapter.base_model.revision,
    }
    dataset = dataset_services.dataset_upload(name="rows", content=ROW)
    version = add_version(adapter)
    run = TrainingRun.objects.create(
        adapter=adapter, dataset=dataset, dataset_sha256=dataset.sha256, version=version
    )
    own = {"digest": version.digest, "cases_sha256": batch_scores._cases_sha256(suite_version)}
    scores = judging.BatchScores(
        given=Given(**(stated | (given or {}))),
        **(own | changes),
        candidate=tuple(candidate),
        live=tuple(of_live),
    )
    if why_not := GateJudge().take(run, version, scores):
        events.event_add(run, why_not)
    return run


def told(run: TrainingRun) -> list[str]:
    return list(run.events.order_by("pk").values_list("message", flat=True))


def test_both_evaluations_take_the_batchs_scores_and_ask_for_answers_alone(
    gated: Adapter, asked: list[tuple[str, bool]]
) -> None:
    run = trained(gated)
    run_all()
    assert Counter(asked) == {("invoices@2", False): NUM_CASES, ("invoices@1", False): NUM_CASES}
    decision = GateDecision.objects.get()
    assert (decision.status, live(gated)) == (Status.PROMOTE, 2)
    logprob = next(each for each in decision.findings if each["metric"] == "logprob")
    assert (logprob["mean"], logprob["num"]) == (pytest.approx(0.25), NUM_CASES)
    scored = dict(Result.objects.values_list("evaluation__model", "logprob").distinct())
    assert scored == {"invoices@2": -1.0, "invoices@1": -2.0}
    both = "The batch scored 120 expected answers of the gate's suite, of both versions"
    assert told(run) == [both]
    # The next gate needs other scores of the live version, but not its answers again.
    asked.clear()
    trained(gated, of_live=[(-3.0, 4)] * NUM_CASES)
    run_all()
    assert Counter(asked) == {("invoices@3", False): NUM_CASES}
    assert live(gated) == 3
    newest = Evaluation.objects.filter(model="invoices@2").latest("created_at")
    assert (newest.num_done, newest.summary["score"]) == (NUM_CASES, 1.0)
    assert newest.summary["logprob"] == -0.75
    # One that no batch scored asks workers for both sides.
    asked.clear()
    add_version(gated)
    run_all()
    assert Counter(asked) == {("invoices@4", True): NUM_CASES, ("invoices@3", True): NUM_CASES}
    assert live(gated) == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"digest": "f" * 64}, "its batch scored another adapter"),
        ({"cases_sha256": "f" * 64}, "its batch scored other cases"),
        ({"given": {"live_digest": "f" * 64}}, "another version is live than its batch scored"),
        ({"given": {"base_revision": "other"}}, "its batch scored over another base"),
        ({"suite": True}, "its batch scored an earlier suite"),
    ],
)
def test_workers_are_asked_for_both_when_something_does_not_match(
    gated: Adapter, asked: list[tuple[str, bool]], changes: dict[str, Any], why: str
) -> None:
    is_suite = changes.pop("suite", False)
    run = trained(gated, **changes)
    if is_suite:
        suites.suite_version_create(name="totals", cases=cases(), origin={"kind": "api"})
    gate.gates_decide()
    begun = Evaluation.objects.order_by("model").values_list("model", "scored_in")
    assert list(begun) == [("invoices@1", None), ("invoices@2", None)]
    assert told(run)[-1] == f"The gate asks serving workers to score the expected answers: {why}"


def test_scores_that_are_not_the_suites_are_not_kept(
    gated: Adapter, asked: list[tuple[str, bool]], globex: Party
) -> None:
    run = trained(gated, [(-1.0, 4)], [(-1.0, 4)])
    assert told(run) == ["it has 1 scores for 120 expected answers"]
    with tenant_scope(globex.tenant.pk):
        one = cases(1)
        theirs = suites.suite_version_create(name="theirs", cases=one, origin={"kind": "api"})
    run = trained(gated, [(-1.0, 4)], [(-1.0, 4)], given={"suite_version": str(theirs.pk)})
    assert told(run) == ["the suite was deleted"]
    assert not BatchScores.objects.exists()


def test_scores_that_go_meanwhile_hold_the_version(
    gated: Adapter, asked: list[tuple[str, bool]]
) -> None:
    trained(gated)
    gate.gates_decide()
    BatchScores.objects.all().delete()
    run_all()
    decision = GateDecision.objects.get()
    assert (decision.status, live(gated)) == (Status.HOLD, 1)
    assert "The scores of its batch were deleted: evaluate again." in decision.reasons[0]


def test_log_probabilities_of_two_programs_are_not_compared(
    gated: Adapter, asked: list[tuple[str, bool]]
) -> None:
    trained(gated)
    begin("invoices@1")
    run_all()
    asked_of, scored = (
        Evaluation.objects.get(model="invoices@1", scored_in__isnull=is_asked)
        for is_asked in (True, False)
    )
    candidate = Evaluation.objects.get(model="invoices@2")
    assert pair_of(paired(scored, candidate)[0]).logprob == -0.25
    assert pair_of(paired(asked_of, candidate)[0]).logprob is None


def test_a_few_are_kept_and_go_with_their_version(
    gated: Adapter, asked: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_scores, "MAX_KEPT", 2)
    runs = [trained(gated) for _ in range(3)]
    kept = BatchScores.objects.order_by("created_at").values_list("version_id", flat=True)
    assert list(kept) == [run.version_id for run in runs[1:]]
    AdapterVersion.objects.get(pk=runs[2].version_id).delete()
    assert BatchScores.objects.count() == 1
