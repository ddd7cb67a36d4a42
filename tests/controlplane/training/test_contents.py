"""Rows that nothing reads any more are removed from the store; those that something does stay."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import tasks
from controlplane.training.datasets import contents
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, DatasetContent, TrainingRun
from controlplane.training.runs import services as run_services
from controlplane.usage.limits import quotas
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import ROWS


def grow_old() -> None:
    then = timezone.now() - contents.KEPT - dt.timedelta(seconds=1)
    DatasetContent.objects.update(wanted_at=then)


def is_there(key: str) -> bool:
    return storage.object_size(key) is not None


def test_replaced_rows_go_and_give_their_room_back(in_acme: Party, dataset: Dataset) -> None:
    old = dataset.key
    new = dataset_services.dataset_upload(name="chats", content=ROWS * 2).key
    assert quotas.used("storage_bytes") == 3 * len(ROWS)
    tasks.datasets_sweep()
    assert is_there(old)  # who has just put it may not have named it yet
    grow_old()
    tasks.datasets_sweep()
    assert (is_there(old), is_there(new)) == (False, True)
    assert quotas.used("storage_bytes") == 2 * len(ROWS)


def test_rows_that_a_run_will_read_stay_until_it_has_ended(
    adapter: Adapter, dataset: Dataset
) -> None:
    old = dataset.key
    run_services.training_run_create(adapter_name=adapter.name, dataset_name="chats")
    dataset_services.dataset_upload(name="chats", content=ROWS * 2)
    for status in TrainingRun.ACTIVE:
        TrainingRun.objects.update(status=status)
        grow_old()
        tasks.datasets_sweep()
        assert is_there(old)
    TrainingRun.objects.update(status="succeeded")
    tasks.datasets_sweep()
    assert not is_there(old)


def test_rows_that_come_again_are_kept(in_acme: Party, dataset: Dataset) -> None:
    dataset_services.dataset_upload(name="chats", content=ROWS * 2)
    grow_old()
    dataset_services.dataset_upload(name="other", content=ROWS)
    tasks.datasets_sweep()
    assert is_there(dataset.key)
    assert quotas.used("storage_bytes") == 3 * len(ROWS)


def test_another_tenants_same_rows_stay(in_acme: Party, dataset: Dataset, globex: Party) -> None:
    with tenant_scope(globex.tenant.id):
        theirs = dataset_services.dataset_upload(name="chats", content=ROWS)
    dataset_services.dataset_upload(name="chats", content=ROWS * 2)
    grow_old()
    with tenant_scope(globex.tenant.id):
        grow_old()
    tasks.datasets_sweep()
    assert (is_there(dataset.key), is_there(theirs.key)) == (False, True)
