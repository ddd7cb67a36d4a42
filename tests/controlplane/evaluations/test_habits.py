"""What is measured of answers, and what holds a version that passed otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from controlplane.adapters.models import Adapter, Promotion
from controlplane.evaluations import asking, suites
from controlplane.evaluations.asking import Asked
from controlplane.evaluations.habits import (
    Habits,
    Limits,
    alarms,
    habits_of,
    is_refusal,
    repeated_share,
)
from controlplane.evaluations.models import Case, Evaluation, GateDecision
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.evaluations.conftest import add_version, cases
from tests.controlplane.evaluations.test_gate import live, run_all

SCHEMA = [{"type": "json_schema", "schema": {"type": "object", "required": ["total"]}}]
CALM = Habits(length=100, refusals=0.0, repeated=0.0, invalid=0.0)


def test_habits_are_means_over_answers() -> None:
    found = habits_of([('{"total": 1}', SCHEMA), ("I'm sorry, no.", SCHEMA), ("a b c d e", [])])
    assert found == Habits(length=(12 + 14 + 9) / 3, refusals=1 / 3, repeated=0.0, invalid=0.5)
    assert habits_of([("yes", [])]).invalid is None


def test_repeated_text_is_the_share_of_passages_that_stood_there_before() -> None:
    assert repeated_share("a b c d A B C D") == pytest.approx(1 / 5)
    assert repeated_share("so " * 13) == pytest.approx(9 / 10)
    assert repeated_share("three words only") == 0.0


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("I can\u2019t help with that.", True),
        ("As an AI, I have no opinion.", True),
        ("Das kann ich nicht sagen.", False),
        ("Ich kann dir leider nicht helfen.", True),
        ("The total is 4 EUR.", False),
        ("x" * 300 + " I cannot.", False),
    ],
)
def test_a_refusal_is_found_at_the_beginning(text: str, is_one: bool) -> None:
    assert is_refusal(text) is is_one


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"length": 200}, None),
        ({"length": 201}, "Answers grew from 100 to 201 characters"),
        ({"repeated": 0.2}, None),
        ({"repeated": 0.21}, "Repeated text grew from 0% to 21%; the limit is 20 points."),
        ({"refusals": 0.25}, "Refusals grew from 0% to 25%"),
        ({"invalid": 0.11}, "Answers that break their schema grew from 0% to 11%"),
        ({"invalid": None}, None),
    ],
)
def test_growth_over_a_limit_is_named(after: dict[str, Any], said: str | None) -> None:
    found = alarms(CALM, Habits(**{**CALM.as_json(), **after}), Limits())
    assert (not found) if said is None else found[0].startswith(said)


def test_few_characters_more_are_no_alarm() -> None:
    short = Habits(length=4, refusals=0.0, repeated=0.0, invalid=None)
    assert not alarms(short, Habits(length=54, refusals=0, repeated=0, invalid=None), Limits())


METHODS: list[dict[str, Any]] = [{}, {"method": "dpo"}, {"method": "reinforcement"}]


@pytest.mark.parametrize("method", METHODS, ids=["supervised", "dpo", "reinforcement"])
def test_a_run_that_games_its_measure_is_held_until_a_person_promotes_it(
    gated: Adapter, scope: Party, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    loose = [{**case, "checks": [{"type": "contains"}]} for case in cases()]
    suites.suite_version_create(name="totals", cases=loose, origin={"kind": "api"})

    def ask(evaluation: Evaluation, _: Any, cases: Sequence[Case], __: Any) -> list[Asked]:
        more = " and so it is again" * 9 if evaluation.model == "invoices@2" else ""
        return [
            Asked(
                case=case,
                output=case.expected + more,
                finish_reason="stop",
                logprob=-2.0,
                num_tokens=4,
            )
            for case in cases
        ]

    monkeypatch.setattr(asking, "ask", ask)
    dataset = dataset_services.dataset_upload(
        name="rows",
        content=b'{"messages": [{"role": "user", "content": "a"}, '
        b'{"role": "assistant", "content": "b"}]}',
    )
    version = add_version(gated)
    run = TrainingRun.objects.create(
        adapter=gated,
        dataset=dataset,
        dataset_sha256=dataset.sha256,
        version=version,
        hyperparameters=method,
    )
    run_all()
    decision = GateDecision.objects.get()
    assert (decision.status, decision.outcome, live(gated)) == ("hold", "held", 1)
    assert decision.reasons[0].startswith("Answers grew from 9 to 180 characters")
    assert decision.reasons[1].startswith("Repeated text grew from 0% to ")
    told = as_key(scope).get(f"/api/v1/training-runs/{run.pk}").json()["habits"]
    assert told == decision.habits and told["num"] == 120
    assert told["after"]["length"] - told["before"]["length"] == pytest.approx(19 * 9)
    promoted = as_key(scope).post("/api/v1/adapters/invoices/versions/2/promote")
    assert promoted.status_code == 200, promoted.json()
    assert Promotion.objects.latest("created_at").cause == "promoted"


def test_the_limits_are_the_adapters(gated: Adapter, scope: Party) -> None:
    said = {"suite": "totals", "max_length_ratio": 100, "max_repeated_rise": 1}
    path = "/api/v1/adapters/invoices"
    told = as_key(scope).patch(path, {"gate": said}, format="json").json()["gate"]
    assert {name: told[name] for name in said} == said
    assert (told["max_refusals_rise"], told["max_invalid_rise"]) == (0.2, 0.1)
    wrong = {"gate": {"suite": "totals", "max_length_ratio": 0.5}}
    answer = as_key(scope).patch(path, wrong, format="json")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "gate.max_length_ratio"
