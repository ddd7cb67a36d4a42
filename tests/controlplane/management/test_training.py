# ruff: noqa: F811  (fixtures)
"""Datasets, runs and schedules over HTTP: their owner, a colleague who only reads, a stranger."""

from __future__ import annotations

import datetime as dt
import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from contract.training.daily_window import DailyWindow
from controlplane.adapters.models import Adapter, BaseModel
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, TrainingRun
from controlplane.training.runs import services as run_services
from tests.controlplane.conftest import Party, as_key, as_user
from tests.controlplane.training.conftest import (  # noqa: F401
    ROWS,
    base_models_dir,
    tiny_base,
    warm_trainer,
)

DATASETS, RUNS = "/api/v1/datasets", "/api/v1/training-runs"
SCHEDULE = "/api/v1/adapters/greeter/schedule"
CRON = {"dataset": "chats", "cron": "30 2 * * *", "timezone": "Europe/Berlin"}


@pytest.fixture
def ready(acme: Party, tiny_base: BaseModel) -> Party:
    """acme with an adapter and a dataset, and no scope left open: each request opens its own."""
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="chats", content=ROWS)
        Adapter.objects.create(name="greeter", base_model=tiny_base)
    return acme


def upload(client: Any, content: bytes = ROWS, query: str = "?name=chats", **extra: Any) -> Any:
    return client.generic("POST", DATASETS + query, content, **extra)


def error_of(answer: Any, status: int, param: str | None = None) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    return error


@pytest.mark.parametrize(
    "content_type",
    ["application/jsonl", "application/json", "application/x-www-form-urlencoded", "text/plain"],
)
def test_a_dataset_is_uploaded_as_the_body(acme: Party, content_type: str) -> None:
    client = as_key(acme)
    answer = upload(client, content_type=content_type)
    assert answer.status_code == 201, answer.json()
    assert (answer.json()["name"], answer.json()["num_rows"]) == ("chats", 8)
    listed = client.get(DATASETS).json()
    assert [row["id"] for row in listed["data"]] == [answer.json()["id"]]
    assert client.get(f"{DATASETS}/chats").json() == answer.json()


def test_a_bad_dataset_is_refused(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    client = as_key(acme)
    error_of(upload(client, query=""), 400, "name")
    error_of(upload(client, query="?name=A%20B"), 400, "name")
    error_of(upload(client, b""), 400, "body")
    error = error_of(upload(client, ROWS + b"{}"), 400, "body")
    assert error["message"].startswith("line 9 has neither `messages` nor")
    assert error["code"] == "invalid_dataset"
    monkeypatch.setattr(dataset_services, "MAX_DIRECT_BYTES", len(ROWS) - 1)
    error_of(upload(client), 413)
    with tenant_scope(acme.tenant.id):
        assert not Dataset.objects.exists()


def test_a_run_is_made_read_and_cancelled(ready: Party, settings: Any) -> None:
    client = as_key(ready)
    body = {"adapter": "greeter", "dataset": "chats", "hyperparameters": {"rank": 4}}
    made = client.post(RUNS, body, format="json")
    assert made.status_code == 201, made.json()
    run = made.json()
    assert (run["status"], run["adapter"], run["dataset"]) == ("queued", "greeter", "chats")
    assert (run["hyperparameters"], run["version"], run["error"]) == ({"rank": 4}, None, "")
    url = f"{RUNS}/{run['id']}"
    assert client.get(url).json() == run
    assert client.get(f"{RUNS}?adapter=greeter").json()["data"] == [run]
    error_of(client.get(f"{RUNS}?adapter=nope"), 404)
    assert run["waits_until"] is None
    opens_at = (timezone.now() + dt.timedelta(hours=2)).replace(second=0, microsecond=0)
    window = f"{opens_at:%H:%M}-{opens_at + dt.timedelta(hours=1):%H:%M}"
    settings.TRAINING_WINDOW = DailyWindow.parse(window)
    assert client.get(url).json()["waits_until"] == f"{opens_at:%Y-%m-%dT%H:%M:%SZ}"
    assert client.post(f"{url}/cancel").json()["status"] == "cancelled"
    with tenant_scope(ready.tenant.id):
        TrainingRun.objects.update(status="succeeded", cancel_requested=False)
    error_of(client.post(f"{url}/cancel"), 409)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"dataset": "nope"}, 404, "dataset"),
        ({"dataset": 1.5}, 404, "dataset"),
        ({"dataset": None}, 400, "dataset"),
        ({"adapter": ["greeter"]}, 400, "adapter"),
        ({"adapter": "No Name"}, 400, "adapter"),
        ({"hyperparameters": []}, 400, "hyperparameters"),
        ({"hyperparameters": {"rank": "8"}}, 400, "hyperparameters.rank"),
        ({"hyperparameters": {"target_modules": ["a", ".*"]}}, 400, None),
        ({"base_model": "other"}, 409, "base_model"),
        ({"epochs": 3}, 400, "epochs"),
    ],
)
def test_a_wrong_run_is_refused_by_its_field(
    ready: Party, change: dict[str, Any], status: int, param: str | None
) -> None:
    body = {"adapter": "greeter", "dataset": "chats"} | change
    answer = as_key(ready).post(RUNS, body, format="json")
    error_of(answer, status, param or "hyperparameters.target_modules.1")


def test_a_schedule_is_set_read_and_deleted(ready: Party) -> None:
    client = as_key(ready)
    error_of(client.get(SCHEDULE), 404)
    answer = client.put(SCHEDULE, CRON, format="json")
    assert answer.status_code == 200, answer.json()
    schedule = answer.json()
    assert (schedule["cron"], schedule["timezone"]) == ("30 2 * * *", "Europe/Berlin")
    assert schedule["next_run_at"][11:16] in {"00:30", "01:30"}
    assert client.get(SCHEDULE).json() == schedule
    assert client.put(SCHEDULE, CRON | {"is_paused": True}, format="json").json()["is_paused"]
    assert client.delete(SCHEDULE).status_code == 204
    error_of(client.delete(SCHEDULE), 404)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"cron": "nightly"}, 400, "cron"),
        ({"cron": "* * * * * *"}, 400, "cron"),
        ({"cron": None}, 400, "cron"),
        ({"timezone": "Berlin"}, 400, "timezone"),
        ({"timezone": "Europe/\u0000"}, 400, "timezone"),
        ({"dataset": "nope"}, 404, "dataset"),
        ({"hyperparameters": {"rank": 0}}, 400, "hyperparameters.rank"),
        ({"zone": "UTC"}, 400, "zone"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_field(
    ready: Party, change: dict[str, Any], status: int, param: str
) -> None:
    error_of(as_key(ready).put(SCHEDULE, CRON | change, format="json"), status, param)
    with tenant_scope(ready.tenant.id):
        assert not Schedule.objects.exists()


def test_a_viewer_reads_and_writes_nothing(ready: Party) -> None:
    with tenant_scope(ready.tenant.id):
        run = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    viewer = as_user(ready.viewer)
    for url in (DATASETS, f"{DATASETS}/chats", RUNS, f"{RUNS}/{run.pk}"):
        assert viewer.get(url).status_code == 200
    body = {"adapter": "greeter", "dataset": "chats"}
    for answer in (
        upload(viewer, content_type="application/jsonl"),
        viewer.post(RUNS, body, format="json"),
        viewer.post(f"{RUNS}/{run.pk}/cancel"),
        viewer.put(SCHEDULE, CRON, format="json"),
        viewer.delete(SCHEDULE),
    ):
        error_of(answer, 403)
    owner = as_user(ready.owner)
    assert owner.get(f"{RUNS}/{run.pk}").json()["status"] == "queued"
    assert owner.put(SCHEDULE, CRON, format="json").status_code == 200


def test_a_strangers_things_are_not_there(ready: Party, globex: Party) -> None:
    with tenant_scope(ready.tenant.id):
        run = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    assert as_key(ready).put(SCHEDULE, CRON, format="json").status_code == 200
    stranger = as_key(globex)
    for url in (DATASETS, RUNS):
        assert stranger.get(url).json()["data"] == []
    for theirs, nobodys in (
        (f"{DATASETS}/chats", f"{DATASETS}/nope"),
        (f"{RUNS}/{run.pk}", f"{RUNS}/{uuid.uuid4()}"),
        (SCHEDULE, SCHEDULE.replace("greeter", "nope")),
    ):
        answers = [stranger.get(url) for url in (theirs, nobodys)]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].content == answers[1].content
    error_of(stranger.post(f"{RUNS}/{run.pk}/cancel"), 404)
    error_of(stranger.put(SCHEDULE, CRON, format="json"), 404)
    error_of(stranger.delete(SCHEDULE), 404)
    body = {"adapter": "greeter", "dataset": "chats"}
    error_of(stranger.post(RUNS, body, format="json"), 404, "dataset")
    owner = as_key(ready)
    assert owner.get(f"{RUNS}/{run.pk}").json()["status"] == "queued"
    assert owner.get(SCHEDULE).status_code == 200


def test_nothing_is_open(db: None) -> None:
    for url in (DATASETS, RUNS, SCHEDULE):
        assert Client().get(url).status_code == 401


def test_the_commands_do_the_same(ready: Party, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS * 2)

    def call(*arguments: str) -> dict[str, Any]:
        output = io.StringIO()
        call_command(*arguments, stdout=output)
        printed: dict[str, Any] = json.loads(output.getvalue())
        return printed

    added = call("dataset_add", "--tenant", "acme", "--name", "more", str(path))
    assert (added["name"], added["num_rows"]) == ("more", 16)
    command = ("schedule_set", "--tenant", "acme", "--adapter", "greeter", "--dataset", "more")
    options = ("--cron", "0 4 * * *", "--hyperparameters", '{"rank": 4}')
    assert call(*command, *options)["next_run_at"][11:16] == "04:00"
    with tenant_scope(ready.tenant.id):
        assert Schedule.objects.get().hyperparameters == {"rank": 4}
    for wrong in (
        (*command, "--cron", "never"),
        (*command, "--cron", "0 4 * * *", "--hyperparameters", "{"),
        ("dataset_add", "--tenant", "nobody", "--name", "x", str(path)),
        ("dataset_add", "--tenant", "acme", "--name", "x", str(tmp_path / "none")),
    ):
        with pytest.raises(CommandError):
            call(*wrong)
