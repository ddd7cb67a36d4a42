"""Celery's tasks of training: the tick (queue `ops`), the runs (queue `train`), the reports on
datasets (queue `inspect`), and the pulls from their sources (queue `ingest`)."""

from __future__ import annotations

from celery import shared_task

from controlplane.infra.health.liveness import show_alive
from controlplane.training.datasets import contents, pulls, reports, sources
from controlplane.training.datasets.reports import REPORT_TASK
from controlplane.training.primitives import states as client_states
from controlplane.training.runs import events, execution, lost_runs
from controlplane.training.runs.kept import saved_states
from controlplane.training.runs.sending import EXECUTE_TASK
from controlplane.training.schedules import history, schedules


@shared_task
def schedules_fire() -> None:
    """Start the runs that are due, and handle lost ones."""
    show_alive("beat")  # because beat sends this task
    schedules.schedules_fire()
    schedules.windows_close()
    history.slots_conclude()
    lost_runs.training_runs_reconcile()
    if pulls.pulls_due():
        sources.pulls_send()


@shared_task(name=EXECUTE_TASK)
def training_run_execute(tenant_id: str, run_id: str) -> None:
    """Train the next run, perhaps with others; it may not be the one that sent this message.

    If a message is delivered twice, each run is still trained once.
    """
    execution.training_next()


@shared_task
def datasets_sweep() -> None:
    """Remove rows, checkpoints and metrics that nothing needs; ask again for pending reports."""
    contents.contents_sweep()
    saved_states.states_sweep()
    events.events_sweep()
    history.history_sweep()
    reports.reports_sweep()
    client_states.sweep()


@shared_task(name=sources.PULL_TASK)
def dataset_pulls_run() -> None:
    """Do a pull that is due; another message follows while there are more."""
    if pulls.pull_next() and pulls.pulls_due():
        sources.pulls_send()


@shared_task(name=REPORT_TASK)
def dataset_report(tenant_id: str) -> None:
    """Make a pending report, which may not be the one that sent this message."""
    reports.report_next()
