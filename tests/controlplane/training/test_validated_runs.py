"""Runs that are validated, and rows that are too long: from the API through the real trainer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.adapters.models import Adapter
from controlplane.errors import Conflict
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import tasks
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, TrainingRun
from controlplane.training.runs import execution
from controlplane.training.runs import services as run_services
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.training.conftest import FAST, ROWS, SHARED_ROWS
from tests.controlplane.training.test_contents import grow_old, is_there

pytestmark = pytest.mark.django_db(transaction=True)
RUNS = "/api/v1/training-runs"
LONG = (
    ROWS
    + json.dumps(
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "world " * 100},
            ]
        }
    ).encode()
)


def make_run(**hyperparameters: Any) -> TrainingRun:
    return run_services.training_run_create(
        adapter_name="greeter", dataset_name="chats", hyperparameters=FAST | hyperparameters
    )


def execute(run: TrainingRun) -> TrainingRun:
    execution.training_run_execute(run.pk)
    run.refresh_from_db()
    return run


def test_a_run_keeps_a_share_back_and_shows_both_curves(adapter: Adapter, in_acme: Party) -> None:
    dataset_services.dataset_upload(name="chats", content=SHARED_ROWS)
    run = execute(make_run(validation_share=0.5, max_steps=4, eval_steps=1))
    assert (run.status, run.error) == ("succeeded", "")
    progress = run.progress
    assert progress["rows"] + progress["validation_rows"] == 40
    assert 0 < progress["validation_rows"] < 40
    assert [step for step, _ in progress["validation_losses"]] == [1, 2, 3, 4]
    losses = dict(progress["validation_losses"])
    assert losses[progress["best_step"]] == progress["best_loss"] == min(losses.values())
    page = browser_of(in_acme.viewer).get(f"/console/training/runs/{run.pk}").content.decode()
    assert page.count('<polyline class="curve') == 2
    assert f"the state after step {progress['best_step']}" in page


def test_a_run_is_validated_with_another_dataset(
    adapter: Adapter, dataset: Dataset, in_acme: Party
) -> None:
    others = dataset_services.dataset_upload(name="others", content=ROWS[: len(ROWS) // 2])
    client = as_key(in_acme)
    body: dict[str, Any] = {"adapter": "greeter", "dataset": "chats", "hyperparameters": FAST}
    made = client.post(RUNS, body | {"validation_dataset": "others"}, format="json").json()
    assert (made["validation_dataset"], made["validation_sha256"]) == ("others", others.sha256)
    # It is needed until the run has ended, and so are its rows, whatever replaces them.
    answer = client.delete("/api/v1/datasets/others")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "in_use")
    with tenant_scope(in_acme.tenant.id):
        dataset_services.dataset_upload(name="others", content=ROWS * 2)
        grow_old()
        tasks.datasets_sweep()
        assert is_there(others.key)
        run = execute(TrainingRun.objects.get(pk=made["id"]))
    assert (run.status, run.error) == ("succeeded", "")
    assert (run.progress["validation_rows"], run.progress["leaked_rows"]) == (4, 4)
    warned = run.events.filter(level="warn").values_list("message", flat=True)
    assert [message.partition(":")[0] for message in warned] == [
        "4 of 4 rows to validate with have a prompt that is trained on, too"
    ]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"validation_dataset": "nope"}, 404, "validation_dataset"),
        (
            {"validation_dataset": "chats", "hyperparameters": {"validation_share": 0.1}},
            400,
            "validation_dataset",
        ),
        ({"hyperparameters": {"patience": 1}}, 400, "hyperparameters.patience"),
        ({"hyperparameters": {"validation_share": 0.9}}, 400, "hyperparameters.validation_share"),
        ({"hyperparameters": {"truncate": 1}}, 400, "hyperparameters.truncate"),
        ({"dataset": "one"}, 400, "dataset"),
    ],
)
def test_what_cannot_be_is_refused(
    adapter: Adapter, dataset: Dataset, in_acme: Party, change: Any, status: int, param: str
) -> None:
    dataset_services.dataset_upload(name="one", content=ROWS.splitlines()[0])
    body = {"adapter": "greeter", "dataset": "chats"} | change
    answer = as_key(in_acme).post(RUNS, body, format="json")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_schedule_names_the_dataset_to_validate_with(
    adapter: Adapter, dataset: Dataset, in_acme: Party
) -> None:
    others = dataset_services.dataset_upload(name="others", content=ROWS)
    url = "/api/v1/adapters/greeter/schedule"
    body = {"dataset": "chats", "cron": "30 2 * * *", "validation_dataset": "others"}
    made = as_key(in_acme).put(url, body, format="json")
    assert (made.status_code, made.json()["validation_dataset"]) == (200, "others")
    with tenant_scope(in_acme.tenant.id):
        Schedule.objects.update(next_run_at="2026-01-01T00:00Z")
        tasks.schedules_fire()
        run = TrainingRun.objects.get()
        assert (run.validation_dataset, run.validation_sha256) == (others, others.sha256)
        from controlplane.deletion import services as deletion

        with pytest.raises(Conflict, match="the schedule of greeter"):
            deletion.dataset_delete(dataset=others)


@pytest.mark.long
def test_long_rows_fail_a_run_with_their_lines_unless_they_are_to_be_cut(
    adapter: Adapter, in_acme: Party
) -> None:
    dataset_services.dataset_upload(name="chats", content=LONG)
    run = execute(make_run())
    assert run.status == "failed"
    assert "longer than max_length=64 tokens: line 9 has " in run.error
    run = execute(make_run(truncate=True))
    assert (run.status, run.error) == ("succeeded", "")
    assert (run.progress["rows"], run.progress["truncated_rows"]) == (9, 1)
    page = browser_of(in_acme.viewer).get(f"/console/training/runs/{run.pk}").content.decode()
    assert "9, 1 of them cut" in page
