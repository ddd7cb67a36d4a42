"""From a version that becomes ready to the gate's decision, with its evaluations.

The pool is the one thing that is not here: tests/e2e/test_gate.py has it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from django.utils import timezone

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, Promotion
from controlplane.aliases.contents import contents_of
from controlplane.aliases.models import Alias
from controlplane.aliases.services import revision_get
from controlplane.errors import InvalidRequest, Unavailable
from controlplane.evaluations import asking, execution, gate
from controlplane.evaluations.asking import Asked
from controlplane.evaluations.comparison import Changed, pair_of
from controlplane.evaluations.leakage import prompt_digest, trained_digests
from controlplane.evaluations.models import Case, Evaluation, GateDecision, Result
from controlplane.events.audit.models import AuditEvent
from controlplane.events.outbox.models import OutboxEvent
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.evaluations.conftest import (
    EXACT,
    NUM_CASES,
    Skill,
    Source,
    add_version,
    begin,
    cases,
)

Status = GateDecision.Status


def run_all() -> None:
    """Do what the tasks do until nothing is left."""
    gate.gates_decide()
    while execution.evaluate_next():
        gate.gates_decide()


def live(adapter: Adapter) -> int | None:
    found = Adapter.objects.select_related("live_version").get(pk=adapter.pk).live_version
    return found.number if found else None


def test_a_version_that_is_as_good_goes_live_by_itself(
    gated: Adapter, pool: dict[str, Skill], scope: Party
) -> None:
    pool["invoices@1"] = lambda case: case.position % 10 != 0
    pool["invoices@2"] = lambda case: case.position % 20 != 0
    version = add_version(gated)
    assert live(gated) == 1
    run_all()
    assert live(gated) == 2
    told = as_key(scope).get("/api/v1/adapters/invoices/versions/2/gate").json()
    assert (told["status"], told["outcome"], told["live_version"]) == ("promote", "promoted", 1)
    assert (told["suite"], told["suite_version"]) == ("totals", 1)
    whole = told["findings"][0]
    assert (whole["metric"], whole["num"], whole["is_as_good"]) == ("score", NUM_CASES, True)
    assert whole["low"] < whole["mean"] < whole["high"] and whole["smallest_drop"] > 0
    promoted = Promotion.objects.latest("created_at")
    assert (promoted.cause, promoted.number) == ("gate", 2)
    event = OutboxEvent.objects.get(type="version.gated")
    assert event.data["decision"] == "promote" and event.data["version"] == 2
    assert AuditEvent.objects.filter(
        action__endswith=".gated", resource_id=str(version.pk)
    ).exists()
    assert Evaluation.objects.filter(status="succeeded").count() == 2


def test_a_worse_version_is_held_with_its_reason(gated: Adapter, pool: dict[str, Skill]) -> None:
    pool["invoices@1"] = lambda case: True
    pool["invoices@2"] = lambda case: case.position % 2 == 0  # one slice is broken
    add_version(gated)
    run_all()
    decision = GateDecision.objects.get()
    assert (decision.status, decision.outcome, live(gated)) == (Status.REJECT, "held", 1)
    assert any("of the slice odd falls by 1.000" in why for why in decision.reasons)
    # The live version's answers are not asked for again.
    pool["invoices@3"] = lambda case: True
    add_version(gated)
    run_all()
    assert live(gated) == 3
    assert Evaluation.objects.filter(model="invoices@1").count() == 1


def rows_of(known: list[dict[str, Any]]) -> bytes:
    rows = [
        {"messages": [*case["messages"], {"role": "assistant", "content": case["expected"]}]}
        for case in known
    ]
    return "\n".join(map(json.dumps, rows)).encode()


def test_cases_that_the_training_knew_hold_it(
    gated: Adapter, pool: dict[str, Skill], scope: Party
) -> None:
    dataset = dataset_services.dataset_upload(name="rows", content=rows_of(cases()[:30]))
    pool["invoices@1"] = pool["invoices@2"] = lambda case: True
    version = add_version(gated)
    TrainingRun.objects.create(
        adapter=gated, dataset=dataset, dataset_sha256=dataset.sha256, version=version
    )
    run_all()
    decision = GateDecision.objects.get()
    assert (decision.status, decision.num_leaked, live(gated)) == (Status.HOLD, 30, 1)
    assert "30 of 120 cases are in the training's rows" in decision.reasons[0]
    # So does what the version knew that it begins from.
    other = rows_of(cases()[30:40])
    later = dataset_services.dataset_upload(name="later", content=other)
    child = add_version(gated)
    TrainingRun.objects.create(
        adapter=gated,
        dataset=later,
        dataset_sha256=later.sha256,
        version=child,
        warm_start=version,
        warm_start_name="invoices@2",
    )
    known = {prompt_digest(case["messages"]) for case in cases()}
    assert len(trained_digests(child.pk, known)) == 40
    assert len(trained_digests(version.pk, known)) == 30


@pytest.mark.parametrize("on_pass", ["canary", "hold"])
def test_what_follows_a_pass_is_the_policys(
    gated: Adapter, pool: dict[str, Skill], scope: Party, on_pass: str
) -> None:
    said = {"suite": "totals", "on_pass": on_pass, "canary_percent": 5}
    as_key(scope).patch("/api/v1/adapters/invoices", {"gate": said}, format="json")
    gated.refresh_from_db()
    pool["invoices@1"] = pool["invoices@2"] = lambda case: True
    add_version(gated)
    run_all()
    decision = GateDecision.objects.get()
    outcome = {"canary": "canary", "hold": "held"}[on_pass]
    assert (decision.status, decision.outcome, live(gated)) == (Status.PROMOTE, outcome, 1)
    if on_pass == "hold":
        assert not Alias.objects.exists()
        return
    contents = contents_of(revision_get(alias=Alias.objects.get(name="invoices")))
    [part] = contents.canary
    assert (part.version, contents.canary_percent) == (2, 5)


def test_what_changed_meanwhile_is_not_promoted(gated: Adapter, pool: dict[str, Skill]) -> None:
    pool["invoices@1"] = pool["invoices@2"] = lambda case: True
    add_version(gated)
    gate.gates_decide()
    while execution.evaluate_next():
        pass
    third = add_version(gated, Source.UPLOAD)
    promotion.adapter_version_promote(version=third)
    gate.gates_decide()
    decision = GateDecision.objects.get()
    assert (decision.status, live(gated)) == (Status.HOLD, 3)
    assert "is no longer live" in decision.reasons[0]


def test_an_upload_waits_until_its_gate_is_asked_for(
    gated: Adapter, pool: dict[str, Skill], scope: Party
) -> None:
    pool["invoices@1"] = pool["invoices@2"] = lambda case: True
    add_version(gated, Source.UPLOAD)
    assert not GateDecision.objects.exists()
    path = "/api/v1/adapters/invoices/versions/2/gate"
    assert_error(as_key(scope).get(path), 404)
    assert_error(as_user(scope.viewer).post(path), 403)
    assert as_key(scope).post(path).status_code == 202
    assert_error(as_key(scope).post(path), 409)
    run_all()
    assert live(gated) == 2
    assert "may have been trained on the cases" in GateDecision.objects.get().reasons[-1]
    assert_error(as_key(scope).post(path), 409)  # it is live


def test_a_failed_evaluation_holds_and_says_why(
    gated: Adapter, pool: dict[str, Skill], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> list[Asked]:
        raise Unavailable("No worker serves tiny now.")

    monkeypatch.setattr(asking, "ask", refuse)
    monkeypatch.setattr(execution, "MAX_FAILURES", 2)
    add_version(gated)
    run_all()
    assert GateDecision.objects.get().status == Status.WAITING
    assert not execution.evaluate_next()  # not at once again
    Evaluation.objects.update(lease_until=timezone.now())
    run_all()
    decision = GateDecision.objects.get()
    assert decision.status == Status.HOLD
    assert "No worker serves tiny now." in decision.reasons[0]


def test_a_lost_process_repeats_only_what_it_was_asking_for(
    gated: Adapter, pool: dict[str, Skill], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    died: list[bool] = []

    class Killed(BaseException):
        pass

    def can(case: Case) -> bool:
        asked.append(case.position)
        if len(asked) == 2 * execution.CHUNK + 5 and not died:
            died.append(True)
            raise Killed
        return True

    pool["invoices@1"] = can
    evaluation = begin("invoices@1")
    with pytest.raises(Killed):
        execution.evaluate_next()
    assert not execution.evaluate_next()  # its lease holds
    Evaluation.objects.update(lease_until=timezone.now())
    asked.clear()
    assert execution.evaluate_next()
    assert min(asked) == 2 * execution.CHUNK
    evaluation.refresh_from_db()
    assert (evaluation.status, evaluation.num_done) == ("succeeded", NUM_CASES)
    assert evaluation.summary["score"] == 1.0
    assert evaluation.summary["slices"] == {"even": 1.0, "odd": 1.0}
    assert Result.objects.count() == NUM_CASES


def test_a_cancelled_evaluation_keeps_its_results_and_writes_no_more(
    gated: Adapter, pool: dict[str, Skill], scope: Party
) -> None:
    evaluation = begin("invoices@1")

    def can(case: Case) -> bool:
        if case.position == execution.CHUNK:
            path = f"/api/v1/evaluations/{evaluation.pk}/cancel"
            assert as_key(scope).post(path).json()["status"] == "cancelled"
        return True

    pool["invoices@1"] = can
    assert execution.evaluate_next()
    assert Result.objects.count() == execution.CHUNK
    assert not execution.evaluate_next()
    assert as_key(scope).delete(f"/api/v1/evaluations/{evaluation.pk}").status_code == 204
    assert not Result.objects.exists()


def test_another_meaning_of_the_name_fails_the_run(gated: Adapter, pool: dict[str, Skill]) -> None:
    evaluation = begin("invoices")
    second = add_version(gated, Source.UPLOAD)
    promotion.adapter_version_promote(version=second)
    execution.evaluate_next()
    evaluation.refresh_from_db()
    assert evaluation.status == "failed"
    assert evaluation.error == "invoices meant invoices@1; it is invoices@2 now."


def test_two_evaluations_are_compared_case_by_case(
    gated: Adapter, pool: dict[str, Skill], scope: Party, globex: Party
) -> None:
    add_version(gated, Source.UPLOAD)
    pool["invoices@1"] = lambda case: case.position >= 12
    pool["invoices@2"] = lambda case: case.position != 50
    before, after = begin("invoices@1"), begin("invoices@2")
    path = f"/api/v1/evaluations/compare?before={before.pk}&after={after.pk}"
    assert_error(as_key(scope).get(path), 409)
    run_all()
    told = as_key(scope).get(path).json()
    assert (told["num_cases"], told["num_better"], told["num_worse"]) == (NUM_CASES, 12, 1)
    score = told["differences"][0]
    assert (score["metric"], score["slice"]) == ("score", "")
    assert score["interval"]["mean"] == pytest.approx(11 / NUM_CASES, abs=1e-5)
    assert 0 < score["interval"]["low"] < score["interval"]["high"]
    assert {each["slice"] for each in told["differences"]} == {"", "even", "odd"}
    assert len(told["changed"]) == 13 and told["changed"][0]["before"] == "?"
    assert_error(as_key(globex).get(path), 404, "before")


def test_a_suite_is_bounded_and_stays_while_a_gate_needs_it(gated: Adapter, scope: Party) -> None:
    client = as_key(scope)
    assert_error(client.delete("/api/v1/suites/totals"), 409)
    path = "/api/v1/suites/totals/versions"
    bad = [{"messages": [{"role": "user", "content": "x"}]}]
    assert_error(client.post(path, {"cases": bad}, format="json"), 400, "cases.0")
    bad[0]["checks"] = [{"type": "exact"}]  # type: ignore[assignment]
    assert_error(client.post(path, {"cases": bad}, format="json"), 400, "cases.0.checks.0")
    assert_error(client.post(path, {}, format="json"), 400, "cases")
    assert_error(as_user(scope.viewer).post(path, {"cases": cases(1)}, format="json"), 403)
    assert_error(
        client.patch("/api/v1/adapters/invoices", {"gate": {"suite": "none"}}, format="json"),
        404,
        "gate.suite",
    )
    for suite in ([], {}, 0, False, 1, ["totals"]):
        gate = {"gate": {"suite": suite}}
        assert_error(
            client.patch("/api/v1/adapters/invoices", gate, format="json"), 400, "gate.suite"
        )
    question = [{"role": "user", "content": "x"}]
    for half in (
        {"messages": question, "expected": "\ud800"},
        {"messages": question, "expected": "x", "slice": "\ud800"},
        {"messages": [{"role": "user", "content": "\ud800"}], "expected": "x"},
        {"messages": question, "checks": [{"type": "contains", "value": "\ud800"}]},
    ):
        body = json.dumps({"cases": [half]})
        answer = client.post(path, body, content_type="application/json")
        assert_error(answer, 400, "cases.0")
    blank = {"messages": question, "expected": "  ", "checks": [{"type": "contains"}]}
    assert_error(client.post(path, {"cases": [blank]}, format="json"), 400, "cases.0.checks.0")
    made = client.post(path, {"cases": cases(3)}, format="json").json()
    assert (made["version"], made["num_cases"]) == (2, 3)
    listed = client.get(f"{path}/2/cases").json()["data"]
    assert [case["expected"] for case in listed] == ["It is 2.", "It is 1.", "It is 0."]
    body = {"gate": {}, "promotion_policy": "hold"}
    client.patch("/api/v1/adapters/invoices", body, format="json")
    assert client.delete("/api/v1/suites/totals").status_code == 204
    assert not Case.objects.exists()


def test_a_suite_is_made_of_each_nth_row_of_a_dataset(scope: Party) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{number}"},
                {"role": "assistant", "content": f"a{number}"},
            ]
        }
        for number in range(10)
    ]
    dataset_services.dataset_upload(name="rows", content="\n".join(map(json.dumps, rows)).encode())
    body = {"from_dataset": {"dataset": "rows", "checks": EXACT, "every": 4, "offset": 1}}
    made = as_key(scope).post("/api/v1/suites/held/versions", body, format="json").json()
    assert made["origin"] == {"kind": "dataset", "dataset": "rows", "every": 4, "offset": 1}
    found = Case.objects.order_by("position").values_list("expected", flat=True)
    assert list(found) == ["a1", "a5", "a9"]


def test_sums_over_different_tokens_are_not_compared() -> None:
    before = Result(score=1.0, logprob=-2.0, num_tokens=4)
    for num_tokens, logprob in ((4, -0.75), (5, None)):
        after = Result(score=1.0, logprob=-3.0, num_tokens=num_tokens)
        pair = pair_of(Changed(case=Case(), before=before, after=after))
        assert (pair.score, pair.live_score, pair.logprob) == (1.0, 1.0, logprob)


def test_an_expected_answer_that_is_too_long_leaves_the_answer_its_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answered(evaluation: Evaluation, caller: Any, case: Case) -> Asked:
        return Asked(case=case, output="It is 2.", finish_reason="stop")

    async def scored(caller: Any, case: Case) -> Any:
        raise InvalidRequest("It has more tokens than the context.")

    monkeypatch.setattr(asking, "_answered", answered)
    monkeypatch.setattr(asking, "_scored", scored)
    for checks, output, is_refused in ((EXACT, "It is 2.", False), ([], "", True)):
        case = Case(expected="It is 2.", checks=checks)
        found = asyncio.run(asking._asked(Evaluation(), None, case))  # type: ignore[arg-type]
        assert (found.output, found.logprob, bool(found.error)) == (output, None, is_refused)
