"""The ends of an attempt at a run: final, until somebody resumes it, or before another attempt.

Each checks that the run is still that attempt's, as all writes of a trainer do.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from controlplane.events.audit.services import record
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.metrics import TRAINERS_LOST, TRAINING_ENDED
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events, picking
from controlplane.training.runs import services as run_services
from controlplane.training.runs.attempt import Attempt, unsettle
from controlplane.training.runs.lease import RunLease
from controlplane.training.runs.trainer import LOST, MAX_ERROR_CHARS

log = logging.getLogger(__name__)

#: Number of attempts in a row that may end for one named reason, without a newer saved state.
MAX_ATTEMPTS = 3
#: The same for trainers that were lost: killed from outside, as a deploy or a machine that restarts
#: does several times within a minute, or by the run's own use of memory; nobody can tell which.
#: From the third on, a run waits before the next: see `picking.WAITS_S`.
MAX_LOST = 6

Status = TrainingRun.Status
Level = events.Level


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """Why a run failed; `field` is of the job, as the trainer or the API names it."""

    message: str
    code: str
    field: str = ""


@transaction.atomic
def run_finish(
    run: TrainingRun,
    expected: Status,
    status: Status,
    fault: Fault | None = None,
    attempt: Attempt | None = None,
) -> None:
    rows = RunLease(run).rows(expected)
    error = fault.message if fault else ""
    moved = rows.update(
        status=status,
        error=error[:MAX_ERROR_CHARS],
        error_code=fault.code[:64] if fault else "",
        error_param=fault.field[:100] if fault else "",
        finished_at=timezone.now(),
        lease_until=None,
    )
    if moved:
        if attempt is not None:
            attempt.settle()
        _note_end(run, status, error)
        _tell(run, status, error[:1000])
        record("ended", run, after={"status": status, "error": error[:1000]})
        # Not the error, which may quote a row.
        extra = {"run_id": str(run.pk), "status": status.value, "adapter": run.adapter.name}
        log.info("training ended", extra=extra)
        TRAINING_ENDED.labels(status.value).inc()


def _note_end(run: TrainingRun, status: Status, error: str) -> None:
    """Add the events of a run's end."""
    if status == Status.SUCCEEDED:
        number = TrainingRun.objects.filter(pk=run.pk).values_list("version__number", flat=True)
        name = f"{run.adapter.name}@{number.get()}"
        events.event_add(run, f"New fine-tuned model created: {name}", fine_tuned_model=name)
        events.event_add(run, "The job has successfully completed")
    elif status == Status.FAILED:
        events.event_add(run, f"The job failed: {error}", level=Level.ERROR)
    else:
        events.event_add(run, "The job was cancelled")


@transaction.atomic
def run_abandon(run: TrainingRun, attempt: Attempt) -> None:
    """End an attempt whose run was cancelled, paused, or resumed before it had stopped.

    If another trainer owns the run now, nothing changes.
    """
    now = TrainingRun.objects.select_for_update(of=("self",)).filter(pk=run.pk).first()
    if now is None:
        return
    if now.cancel_requested or (now.dataset_id is None and now.training_file_id is None):
        run_finish(run, Status.RUNNING, Status.CANCELLED, attempt=attempt)
        return
    status = Status.PAUSED if now.pause_requested else Status.QUEUED
    rows = RunLease(run).rows(Status.RUNNING)
    moved = rows.update(
        status=status,
        pause_requested=False,
        num_pauses=F("num_pauses") + 1,
        lease_until=None,
    )
    if moved and status == Status.PAUSED:
        attempt.settle()
        events.event_add(run, "The job was paused; resumed, it continues from here")
        record("paused", run)
    elif moved:
        attempt.settle()


def _tell(run: TrainingRun, status: Status, error: str) -> None:
    """Publish a run's end, unless somebody cancelled it and so knows."""
    told: dict[str, Any] = {"training_run": str(run.pk), "adapter": run.adapter.name}
    if status == Status.SUCCEEDED:
        version = TrainingRun.objects.filter(pk=run.pk).values_list("version__number", flat=True)
        publish(EventType.TRAINING_RUN_SUCCEEDED, **told, version=version.get())
    elif status == Status.FAILED:
        publish(EventType.TRAINING_RUN_FAILED, **told, error=error)


def run_give_back(
    run: TrainingRun, status: Status = Status.RUNNING, why: str = LOST, code: str = "trainer_lost"
) -> None:
    """Queue an interrupted run again, or let it fail after too many attempts that came no further:
    `MAX_LOST` of lost trainers, `MAX_ATTEMPTS` of another reason."""
    lease = RunLease(run)
    lost = TrainingRun.objects.filter(pk=run.pk).values_list("num_lost", flat=True).first()
    num_lost = (lost or 0) + 1
    if num_lost >= (MAX_LOST if why == LOST else MAX_ATTEMPTS):
        run_finish(run, status, Status.FAILED, Fault(_too_often(why, num_lost), code))
        return
    # Not sent now: the trainer may be shutting down. The next tick sends it.
    with transaction.atomic():
        changes = {"status": Status.QUEUED, "lease_until": None, "num_lost": num_lost}
        if lease.rows(status).update(**changes):
            if status == Status.PUBLISHING:
                unsettle(run)
            events.event_add(run, f"{why}; the job {_goes_on(num_lost)}", level=Level.WARN)
            TRAINERS_LOST.inc()
    run_services.training_run_drop(run=run)


def _goes_on(num_lost: int) -> str:
    if wait_s := picking.WAITS_S.get(num_lost):
        return f"is queued again, and begins {wait_s} s after the last attempt began, or later"
    return "is queued again"


def _too_often(why: str, num_lost: int) -> str:
    """Return the error of a run whose trainers were lost, and what its owner can do."""
    if why != LOST:
        return f"{why}, {num_lost} times in a row. Tell the operator, then start the run again."
    return (
        f"The trainer was lost {num_lost} times in a row. If it ran out of memory, use a smaller "
        "batch_size or max_length. Its log says more."
    )
