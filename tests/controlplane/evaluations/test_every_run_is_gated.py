"""A version goes live by the suite alone, whatever made it: each kind of run, however started."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import transaction

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.evaluations.models import GateDecision
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from controlplane.training.runs import publishing
from controlplane.training.runs.attempt import Attempt
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.evaluations.conftest import Skill
from tests.controlplane.evaluations.test_gate import live, run_all

ASKED = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello", "What?"))
GRADER = {
    "type": "string_check", "name": "same", "input": "{{ sample.output_text }}",
    "reference": "{{ item.wanted }}", "operation": "eq",
}  # fmt: skip
#: Method -> a row for it, and its own settings.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "supervised": ({"messages": [ASKED, GOOD]}, {}),
    "dpo": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, {}),
    "reinforcement": ({"messages": [ASKED], "wanted": "Hello"}, {"grader": GRADER}),
}


def start(way: str, scope: Party, adapter: Adapter, settings: dict[str, Any]) -> None:
    if way == "api":
        body = {"adapter": adapter.name, "dataset": "rows", "hyperparameters": settings}
        answer = as_key(scope).post("/api/v1/training-runs", body, format="json")
        assert answer.status_code == 201, answer.json()
    elif way == "console":
        form = {"adapter": adapter.name, "dataset": "rows", **settings}
        if "grader" in form:
            form["grader"] = json.dumps(form["grader"])
        answer = browser_of(scope.owner).post("/console/training/runs", form)
        assert answer.status_code == 302, answer.content
    else:
        schedule = schedule_services.schedule_set(
            adapter=adapter, dataset_name="rows", cron_line="0 3 * * *", hyperparameters=settings
        )
        schedules.schedule_run_now(schedule)


def publish(run: TrainingRun) -> AdapterVersion:
    """Make the trained run's version, and let it pass its checks."""
    TrainingRun.objects.filter(pk=run.pk).update(status="running")
    run.refresh_from_db()
    sizes = {"adapter_config.json": 2, "adapter_model.safetensors": 8}
    version = publishing.version_of(run, sizes, Attempt(run))
    AdapterVersion.objects.filter(pk=version.pk).update(status="ready", digest="2" * 64)
    version.refresh_from_db()
    with transaction.atomic():
        promotion.ready_apply(promotion.lock(version.adapter_id), version)
    return version


@pytest.mark.parametrize("way", ["api", "console", "schedule"])
@pytest.mark.parametrize("method", KINDS)
def test_a_worse_version_of_any_run_stays_out(
    gated: Adapter, pool: dict[str, Skill], scope: Party, method: str, way: str
) -> None:
    row, own = KINDS[method]
    content = (json.dumps(row) + "\n") * 8
    dataset_services.dataset_upload(name="rows", content=content.encode())
    start(way, scope, gated, {"method": method, **own})
    run = TrainingRun.objects.get()
    assert run.hyperparameters.get("method", "supervised") == method
    pool["invoices@1"] = lambda case: True
    pool["invoices@2"] = lambda case: case.position % 2 == 0
    version = publish(run)
    assert live(gated) == 1
    run_all()
    decision = GateDecision.objects.get(version=version)
    assert (decision.status, decision.outcome, live(gated)) == ("reject", "held", 1)
    page = browser_of(scope.viewer).get(f"/console/training/runs/{run.pk}").content.decode()
    assert "It is worse: " in page
    assert ">Mean length<" in page and "9 characters" in page and "Break their schema" not in page
