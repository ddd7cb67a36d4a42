"""What a person changes: datasets, runs and schedules of the tenant in scope."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Any

import pytest
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.errors import ApiError, Conflict, InvalidRequest, NotFound, PayloadTooLarge
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, TrainingRun, dataset_key
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import services as schedule_services
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, ROWS


def test_a_dataset_is_stored_under_its_digest(dataset: Dataset) -> None:
    assert dataset.sha256 == hashlib.sha256(ROWS).hexdigest()
    assert (dataset.num_bytes, dataset.num_rows) == (len(ROWS), 8)
    assert storage.read_bytes(dataset.key, max_bytes=1 << 20) == ROWS


def test_uploading_again_replaces_what_the_name_means_but_not_what_runs_read(
    dataset: Dataset, adapter: Adapter
) -> None:
    run = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    again = dataset_services.dataset_upload(name="chats", content=ROWS * 2)
    assert (again.pk, again.num_rows) == (dataset.pk, 16)
    run.refresh_from_db()
    kept = dataset_key(run.tenant_id, run.dataset_sha256)
    assert storage.read_bytes(kept, max_bytes=1 << 20) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "param"),
    [
        ("Chats", ROWS, "name"),
        ("a/b", ROWS, "name"),
        ("chats", b"", "body"),
        ("chats", ROWS + b'{"messages": []}', "body"),
    ],
)
def test_a_bad_dataset_is_refused(in_acme: Party, name: str, content: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        dataset_services.dataset_upload(name=name, content=content)
    assert caught.value.param == param
    assert not Dataset.objects.exists()


def test_the_refusal_of_a_dataset_names_its_lines(in_acme: Party) -> None:
    told = r"line 9 has neither `messages` .*; line 10 is not JSON"
    with pytest.raises(InvalidRequest, match=told):
        dataset_services.dataset_upload(name="chats", content=ROWS + b"{}\nx\n")


def test_a_dataset_that_is_too_long_is_refused(in_acme: Party) -> None:
    with pytest.raises(PayloadTooLarge):
        dataset_services.dataset_upload(
            name="chats", content=b" " * (dataset_services.MAX_DIRECT_BYTES + 1)
        )


def test_a_run_of_an_unknown_adapter_makes_it(dataset: Dataset, tiny_base: Any) -> None:
    run = run_services.training_run_create(adapter_name="new", dataset_name="chats")
    assert (run.status, run.adapter.base_model, run.attempts) == ("queued", tiny_base, 0)


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"dataset_name": "nope"}, NotFound, "dataset"),
        ({"dataset_name": "../x"}, NotFound, "dataset"),
        ({"adapter_name": "No"}, InvalidRequest, "adapter"),
        ({"hyperparameters": {"rank": 1000}}, InvalidRequest, "hyperparameters.rank"),
        ({"base_model_name": "other"}, Conflict, "base_model"),
    ],
)
def test_a_wrong_run_is_refused_by_its_field(
    adapter: Adapter, dataset: Dataset, change: dict[str, Any], error: type[ApiError], param: str
) -> None:
    fields: dict[str, Any] = {"adapter_name": "greeter", "dataset_name": "chats"}
    with pytest.raises(error) as caught:
        run_services.training_run_create(**(fields | change))
    assert caught.value.param == param
    assert not TrainingRun.objects.exists()


def test_another_tenants_dataset_is_not_there(
    adapter: Adapter, dataset: Dataset, globex: Party
) -> None:
    with tenant_scope(globex.tenant.id):
        with pytest.raises(NotFound):
            run_services.training_run_create(adapter_name="mine", dataset_name="chats")
        assert not Adapter.objects.exists()


def test_a_queued_run_is_cancelled_at_once(adapter: Adapter, dataset: Dataset) -> None:
    run = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    for _ in range(2):  # again, it changes nothing
        run = run_services.training_run_cancel(run=run)
        assert (run.status, run.cancel_requested) == ("cancelled", True)
    assert run.finished_at is not None


@pytest.mark.parametrize("status", ["publishing", "succeeded", "failed"])
def test_a_run_past_training_is_not_cancelled(
    adapter: Adapter, dataset: Dataset, status: str
) -> None:
    run = run_services.training_run_create(adapter_name="greeter", dataset_name="chats")
    TrainingRun.objects.filter(pk=run.pk).update(status=status)
    with pytest.raises(Conflict, match=status):
        run_services.training_run_cancel(run=run)


def set_schedule(adapter: Adapter, **change: Any) -> Schedule:
    fields: dict[str, Any] = {"dataset_name": "chats", "cron_line": "30 2 * * *"}
    return schedule_services.schedule_set(adapter=adapter, **(fields | change))


def test_a_schedule_is_set_and_replaced(adapter: Adapter, dataset: Dataset) -> None:
    first = set_schedule(adapter, hyperparameters=FAST)
    assert timezone.now() < first.next_run_at <= timezone.now() + dt.timedelta(days=1)
    second = set_schedule(adapter, timezone_name="Asia/Kolkata", is_paused=True)
    assert (second.pk, second.is_paused, second.hyperparameters) == (first.pk, True, {})
    assert (second.next_run_at.hour, second.next_run_at.minute) == (21, 0)
    schedule_services.schedule_delete(adapter=adapter)
    for action in (schedule_services.schedule_delete, schedule_services.schedule_get):
        with pytest.raises(NotFound):
            action(adapter=adapter)


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"cron_line": "every night"}, InvalidRequest, "cron"),
        ({"cron_line": "0 0 31 2 *"}, InvalidRequest, "cron"),
        ({"cron_line": "0 " * 60}, InvalidRequest, "cron"),
        ({"timezone_name": "Mars/Olympus"}, InvalidRequest, "timezone"),
        ({"timezone_name": "../UTC"}, InvalidRequest, "timezone"),
        ({"dataset_name": "nope"}, NotFound, "dataset"),
        ({"hyperparameters": {"speed": 1}}, InvalidRequest, "hyperparameters.speed"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_field(
    adapter: Adapter, dataset: Dataset, change: dict[str, Any], error: type[ApiError], param: str
) -> None:
    with pytest.raises(error) as caught:
        set_schedule(adapter, **change)
    assert caught.value.param == param
    assert not Schedule.objects.exists()
