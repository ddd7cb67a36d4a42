"""Celery's tasks of training: the tick (queue `ops`) and the runs (queue `train`)."""

from __future__ import annotations

from celery import shared_task

from controlplane.infra.liveness import show_alive
from controlplane.training import contents, execution, schedules
from controlplane.training.services import EXECUTE_TASK


@shared_task(name="controlplane.training.tasks.schedules_fire")
def schedules_fire() -> None:
    """Start the runs that are due, and handle lost ones."""
    show_alive("beat")  # which sends this task
    schedules.schedules_fire()
    execution.training_runs_reconcile()


@shared_task(name=EXECUTE_TASK)
def training_run_execute(tenant_id: str, run_id: str) -> None:
    """Train the run that is next: it may be another than the one that sent this message.

    If a message is delivered twice, each run is still trained once.
    """
    execution.training_run_next()


@shared_task(name="controlplane.training.tasks.datasets_sweep")
def datasets_sweep() -> None:
    """Remove dataset rows that no dataset names and no run will read."""
    contents.contents_sweep()
