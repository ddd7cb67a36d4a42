"""A gated adapter with a schedule, whose run made version 2 of three rows more."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.evaluations.models import Case
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun
from controlplane.training.schedules import schedules
from controlplane.training.schedules import services as schedule_services
from tests.controlplane.evaluations.conftest import (
    Skill,
    add_version,
    gated,
    pool,
    scope,
)
from tests.controlplane.evaluations.test_gate import run_all
from tests.controlplane.training.conftest import ROWS

__all__ = ["gated", "pool", "scope"]

MARKER = "Marker-of-acme"
PROGRESS = {
    "losses": [[1, 3.0], [2, 2.0], [3, 1.5]],
    "validation_losses": [[2, 2.5], [3, 1.75]],
    "loss": 1.5,
    "best_loss": 1.75,
    "best_step": 3,
}


def finish(row: ScheduleRun, adapter: Adapter, best_loss: float = 1.75) -> None:
    """End the slot's run as the trainer does, with the adapter's next version."""
    version = add_version(adapter)
    TrainingRun.objects.filter(pk=row.training_run_id).update(
        status="succeeded",
        version=version,
        finished_at=timezone.now(),
        progress={**PROGRESS, "best_loss": best_loss},
    )


@pytest.fixture
def night(gated: Adapter, pool: dict[str, Skill]) -> Callable[[], ScheduleRun]:
    """A function that lets the schedule's night pass, whose version the gate looks at."""
    dataset_services.dataset_upload(name="chats", content=ROWS)
    schedule = schedule_services.schedule_set(
        adapter=gated, dataset_name="chats", cron_line="0 2 1 1 *", timezone_name="Europe/Berlin"
    )

    def answers(wrong: int) -> Callable[[Case], bool]:
        return lambda case: case.position % wrong != 0

    def pass_night() -> ScheduleRun:
        pool["invoices@1"], pool["invoices@2"] = answers(5), answers(60)
        pool["invoices@3"] = answers(2)
        # Seven rows now, then ten.
        dataset_services.dataset_upload(
            name="chats", content=b"\n".join(ROWS.split(b"\n")[:7]) + b"\n"
        )
        finish(schedules.schedule_run_now(schedule), gated, 2.0)
        run_all()
        more = ROWS + b"\n".join(ROWS.split(b"\n")[:2]) + b"\n"
        dataset_services.dataset_upload(name="chats", content=more)
        Schedule.objects.update(next_run_at=timezone.now() - dt.timedelta(minutes=1))
        assert schedules.schedules_fire() == 1
        row = ScheduleRun.objects.get(trigger="clock")
        finish(row, gated)
        run_all()
        return row

    return pass_night
