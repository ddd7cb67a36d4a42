"""The clock's part: a due slot makes one run, whoever ticks and however often."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.adapters.models import Adapter, today
from controlplane.adapters.services import base_model_shutdown_set
from controlplane.errors import Conflict
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training import tasks
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, ScheduleRun, TrainingRun
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, ROWS

HOUR = dt.timedelta(hours=1)


@pytest.fixture
def schedule(adapter: Adapter, dataset: Dataset) -> Schedule:
    return schedule_set(adapter=adapter, hyperparameters=FAST)


def schedule_set(*, adapter: Adapter, cron_line: str = "0 * * * *", **fields: Any) -> Schedule:
    """An hourly schedule that trains on the same rows again; the other fields are rules."""
    own = {
        name: fields.pop(name) for name in ("hyperparameters", "timezone_name") if name in fields
    }
    rules = {"skip_unchanged": False, **fields}
    return schedule_services.schedule_set(
        adapter=adapter, dataset_name="chats", cron_line=cron_line, rules=rules, **own
    )


def states() -> list[tuple[str, str]]:
    """State and reason of each slot, oldest first."""
    rows = ScheduleRun.objects.select_related("training_run").order_by("slot")
    return [(row.state, row.reason) for row in rows]


def finish_runs() -> None:
    TrainingRun.objects.update(status="succeeded")


def test_a_slot_fires_once_when_its_time_has_come(schedule: Schedule) -> None:
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot - dt.timedelta(seconds=1)) == 0
    assert schedules.schedules_fire(slot) == 1
    fired = ScheduleRun.objects.get()
    run = fired.training_run
    assert (fired.slot, run.status, run.hyperparameters) == (slot, "queued", FAST)
    assert run.dataset_sha256 == schedule.dataset.sha256
    finish_runs()
    assert schedules.schedules_fire(slot) == 0
    schedule.refresh_from_db()
    assert schedule.next_run_at == slot + HOUR


def test_slots_missed_while_down_fire_as_one(schedule: Schedule) -> None:
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot + 5 * HOUR) == 1
    assert ScheduleRun.objects.exclude(training_run=None).get().slot == slot + 5 * HOUR
    assert states() == [*[("missed", "late")] * 4, ("skipped", "merged"), ("queued", "")]
    finish_runs()
    assert schedules.schedules_fire(slot + 5 * HOUR) == 0
    schedule.refresh_from_db()
    assert schedule.next_run_at == slot + 6 * HOUR


def test_a_slot_waits_for_the_adapters_run_to_end(schedule: Schedule) -> None:
    slot = schedule.next_run_at
    assert schedules.schedules_fire(slot) == 1
    for status in TrainingRun.ACTIVE:
        TrainingRun.objects.update(status=status)
        assert schedules.schedules_fire(slot + 2 * HOUR) == 0
    finish_runs()
    assert schedules.schedules_fire(slot + 2 * HOUR) == 1


def test_a_paused_schedule_and_a_suspended_tenant_do_not_fire(
    schedule: Schedule, acme: Party
) -> None:
    Schedule.objects.update(is_paused=True)
    assert schedules.schedules_fire(schedule.next_run_at) == 0
    Schedule.objects.update(is_paused=False)
    Tenant.objects.filter(pk=acme.tenant.pk).update(status="suspended")
    assert schedules.schedules_fire(schedule.next_run_at) == 0
    assert not TrainingRun.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_base_model_that_is_shut_down_trains_nothing(
    schedule: Schedule, adapter: Adapter, dataset: Dataset
) -> None:
    base_model = adapter.base_model
    base_model_shutdown_set(base_model=base_model, shutdown_date=today())
    assert schedules.schedules_fire(schedule.next_run_at) == 0
    with pytest.raises(Conflict) as caught:
        run_services.training_run_create(adapter_name=adapter.name, dataset_name="chats")
    assert caught.value.param == "adapter"
    assert not TrainingRun.objects.exists()
    base_model_shutdown_set(base_model=base_model, shutdown_date=today() + dt.timedelta(days=1))
    assert schedules.schedules_fire(schedule.next_run_at) == 1
    base_model_shutdown_set(base_model=base_model, shutdown_date=today())
    run = TrainingRun.objects.get()
    tasks.training_run_execute(str(run.tenant_id), str(run.pk))
    run.refresh_from_db()
    assert (run.status, run.error) == ("failed", f"{base_model.name} was shut down on {today()}.")


def test_a_run_belongs_to_its_schedules_tenant(schedule: Schedule, globex: Party) -> None:
    with tenant_scope(globex.tenant.id):
        dataset_services.dataset_upload(name="chats", content=ROWS)
        own = run_services.training_run_create(adapter_name="other", dataset_name="chats")
        finish_runs()
        other = schedule_set(adapter=own.adapter)
    assert schedules.schedules_fire(other.next_run_at) == 2
    with all_tenants(reason="test"):
        for fired in ScheduleRun.objects.select_related("schedule", "training_run__dataset"):
            tenants = {
                fired.tenant_id,
                fired.schedule.tenant_id,
                fired.training_run.tenant_id,
                fired.training_run.dataset.tenant_id,
            }
            assert len(tenants) == 1


def test_one_schedule_that_fails_keeps_no_other_from_firing(
    schedule: Schedule, dataset: Dataset
) -> None:
    run = run_services.training_run_create(adapter_name="second", dataset_name="chats")
    finish_runs()
    schedule_set(adapter=run.adapter)
    Schedule.objects.filter(pk=schedule.pk).update(timezone="Gone/Zone")
    assert schedules.schedules_fire(schedule.next_run_at) == 1
    schedule.refresh_from_db()
    assert schedule.is_paused


def test_one_schedule_that_meets_a_fault_of_ours_keeps_no_other_from_firing(
    schedule: Schedule, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_services.training_run_create(adapter_name="second", dataset_name="chats")
    finish_runs()
    schedule_set(adapter=run.adapter)
    enqueue = run_services.training_run_enqueue

    def fail(*, adapter: Adapter, **fields: Any) -> TrainingRun:
        if adapter == schedule.adapter:
            raise TypeError("a fault of ours")
        return enqueue(adapter=adapter, **fields)

    monkeypatch.setattr(run_services, "training_run_enqueue", fail)
    assert schedules.schedules_fire(schedule.next_run_at) == 1
    fired = ScheduleRun.objects.get()
    assert fired.training_run.adapter == run.adapter


@pytest.mark.django_db(transaction=True)
def test_ticks_at_the_same_moment_fire_a_slot_once(schedule: Schedule) -> None:
    """Eight threads with connections of their own, many times over."""
    for round_number in range(5):
        now = schedule.next_run_at + round_number * HOUR
        barrier = threading.Barrier(8)
        fired: list[int] = []

        def tick(now: Any = now, barrier: Any = barrier, fired: Any = fired) -> None:
            try:
                barrier.wait()
                fired.append(schedules.schedules_fire(now))
            finally:
                connection.close()

        threads = [threading.Thread(target=tick) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(fired) == 1
        assert len(fired) == 8
        assert ScheduleRun.objects.count() == round_number + 1
        finish_runs()


def test_now_is_the_default(schedule: Schedule) -> None:
    Schedule.objects.update(next_run_at=timezone.now() - HOUR)
    assert schedules.schedules_fire() == 1
