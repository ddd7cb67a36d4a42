"""Let a run wait until somebody resumes it. It keeps its place among its tenant's runs.

A running one writes its state before it stops, and continues from there.
"""

from __future__ import annotations

from django.db import transaction

from controlplane.errors import Conflict
from controlplane.events.audit.services import record
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events, sending
from controlplane.training.runs import services as run_services

Status = TrainingRun.Status

#: Largest number of a run's pauses; each may lose training since the last state.
MAX_PAUSES = 100


def training_run_pause(*, run: TrainingRun) -> TrainingRun:
    """Pause a run; a running one stops within seconds. A repeated call changes nothing.

    Raises Conflict when the run has ended, is publishing, or was paused too often.
    """
    _request_pause(run)
    run_services.training_run_drop(run=run)
    run.refresh_from_db()
    if run.status == Status.PAUSED or run.pause_requested:
        return run
    if run.num_pauses >= MAX_PAUSES:
        raise Conflict(
            f"A run can be paused only {MAX_PAUSES} times while it runs: cancel it, or let it end."
        )
    raise Conflict(f"The run is {run.status} and can no longer be paused.")


@transaction.atomic
def _request_pause(run: TrainingRun) -> None:
    going = TrainingRun.objects.filter(
        pk=run.pk,
        status__in=(Status.QUEUED, Status.RUNNING),
        cancel_requested=False,
        pause_requested=False,
        num_pauses__lt=MAX_PAUSES,
    )
    if going.update(pause_requested=True):
        record("pause_requested", run)


@transaction.atomic
def training_run_resume(*, run: TrainingRun) -> TrainingRun:
    """Queue a paused run again. A repeated call changes nothing. Raises Conflict."""
    rows = TrainingRun.objects.filter(pk=run.pk, cancel_requested=False)
    # One that has not stopped yet is queued again once it has.
    is_resumed = rows.filter(status=Status.PAUSED).update(
        status=Status.QUEUED, pause_requested=False
    ) or rows.filter(status=Status.RUNNING, pause_requested=True).update(pause_requested=False)
    run.refresh_from_db()
    if is_resumed:
        events.event_add(run, "The job was resumed")
        record("resumed", run)
        if run.status == Status.QUEUED:
            transaction.on_commit(lambda: sending.run_send(run))
    elif run.status not in (Status.QUEUED, Status.RUNNING, Status.PUBLISHING):
        raise Conflict(f"The run is {run.status} and cannot be resumed.")
    return run
