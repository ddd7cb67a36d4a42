"""The history of a schedule's slots: a row for each, written in the transaction of its change.

The newest `MAX_OF_SCHEDULE` rows of a schedule are kept, for `KEPT`.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Sequence

from django.db import transaction
from django.db.models import Count
from django.utils import timezone

from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.metrics import SCHEDULE_SLOTS
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import User
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun
from controlplane.training.runs import services as run_services

log = logging.getLogger(__name__)

MAX_OF_SCHEDULE = 200
KEPT = dt.timedelta(days=90)
_MAX_PER_TURN = 500

Status = ScheduleRun.Status
Reason = ScheduleRun.Reason
_SKIPS = {Reason.MERGED, Reason.UNCHANGED, Reason.DAY}


def slots_note(
    schedule: Schedule, slots: Sequence[dt.datetime], reason: Reason, now: dt.datetime
) -> None:
    """Note slots that did not run; publish missed ones. Call it in the slots' transaction."""
    if not slots:
        return
    status = Status.SKIPPED if reason in _SKIPS else Status.MISSED
    rows = [
        ScheduleRun(schedule=schedule, slot=slot, status=status, reason=reason, concluded_at=now)
        for slot in slots
    ]
    # A missed slot that is now run late, and skipped, has a row already.
    ScheduleRun.objects.bulk_create(rows, ignore_conflicts=True)
    _count(status.value, len(rows))
    if status == Status.MISSED:
        _tell_missed(schedule, slots, reason)


def _tell_missed(schedule: Schedule, slots: Sequence[dt.datetime], reason: Reason) -> None:
    publish(
        EventType.SCHEDULE_MISSED,
        adapter=schedule.adapter.name,
        slots=len(slots),
        first_slot=_time(slots[0]),
        last_slot=_time(slots[-1]),
        reason=str(reason.label),
        runs_later=schedule.misfire == Schedule.Misfire.RUN_ONCE,
    )
    extra = {"schedule_id": str(schedule.pk), "slots": len(slots), "reason": reason.value}
    log.warning("a schedule's slots were missed", extra=extra)


def _time(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="minutes").replace("+00:00", "Z")


def slot_run(
    schedule: Schedule,
    slot: dt.datetime,
    trigger: ScheduleRun.Trigger,
    *,
    created_by: User | None = None,
) -> ScheduleRun:
    """Make the run of a slot and its row. Call it with the schedule's row locked.

    Raises RateLimited when the tenant has too many runs.
    """
    before = last_run(schedule)
    run = run_services.training_run_enqueue(
        adapter=schedule.adapter,
        dataset=schedule.dataset,
        validation_dataset=schedule.validation_dataset,
        hyperparameters=schedule.hyperparameters,
        created_by=created_by,
    )
    fields = {
        "training_run": run,
        "status": Status.RAN,
        "reason": "",
        "trigger": trigger,
        "rows_before": before.num_rows if before else None,
        "concluded_at": None,
        "reported_at": None,
    }
    # A missed slot that runs late has a row already.
    row, _ = ScheduleRun.objects.update_or_create(schedule=schedule, slot=slot, defaults=fields)
    _count(Status.RAN.value)
    return row


def last_run(schedule: Schedule) -> TrainingRun | None:
    """Return the adapter's newest run that succeeded."""
    runs = TrainingRun.objects.filter(
        adapter_id=schedule.adapter_id, status=TrainingRun.Status.SUCCEEDED
    )
    return runs.order_by("-created_at").first()


@transaction.atomic
def run_drop(row_id: uuid.UUID, now: dt.datetime) -> bool:
    """Cancel a slot's run that waits and has never begun: its window has closed.

    With the policy `run_once` the slot runs when the window opens again. -> whether it waited
    """
    row = ScheduleRun.objects.select_related("schedule__adapter", "training_run").get(pk=row_id)
    schedule, run = row.schedule, row.training_run
    # In the order of `schedules_fire`: the schedule's row first.
    Schedule.objects.select_for_update().get(pk=schedule.pk)
    if run is None:
        return False
    waiting = TrainingRun.objects.filter(
        pk=run.pk, status=TrainingRun.Status.QUEUED, attempts=0, cancel_requested=False
    )
    if not waiting.update(cancel_requested=True):
        return False
    run_services.training_run_drop(run=run)
    ScheduleRun.objects.filter(pk=row.pk).update(
        status=Status.MISSED, reason=Reason.WINDOW, concluded_at=now
    )
    if schedule.misfire == Schedule.Misfire.RUN_ONCE:
        Schedule.objects.filter(pk=schedule.pk).update(owed_slot=row.slot)
    _count(Status.MISSED.value)
    _tell_missed(schedule, [row.slot], Reason.WINDOW)
    return True


def slots_conclude() -> int:
    """Note the slots whose run has ended. -> their number.

    `endings` publishes a run's failure as it ends.
    """
    with all_tenants(reason="find slots whose run has ended"):
        ended = ScheduleRun.objects.filter(concluded_at=None).exclude(
            training_run__status__in=TrainingRun.ACTIVE
        )
        found = list(
            ended.order_by("created_at").values_list(
                "pk", "tenant_id", "training_run__status", "training_run__finished_at"
            )[:_MAX_PER_TURN]
        )
    num_concluded = 0
    for row_id, tenant_id, status, finished_at in found:
        with tenant_scope(tenant_id):
            open_rows = ScheduleRun.objects.filter(pk=row_id, concluded_at=None)
            if not open_rows.update(concluded_at=finished_at or timezone.now()):
                continue  # another tick did it
        num_concluded += 1
        if status in ("succeeded", "failed"):
            SCHEDULE_SLOTS.labels(status).inc()
    return num_concluded


def history_sweep(now: dt.datetime | None = None) -> int:
    """Delete old rows of all tenants' schedules, and those above the number. -> their number."""
    now = now or timezone.now()
    with all_tenants(reason="find schedules with more history than is kept"):
        counts = ScheduleRun.objects.values("schedule_id", "tenant_id").annotate(num=Count("pk"))
        full = list(
            counts.filter(num__gt=MAX_OF_SCHEDULE).values_list("schedule_id", "tenant_id")[
                :_MAX_PER_TURN
            ]
        )
        old = ScheduleRun.objects.filter(slot__lt=now - KEPT).exclude(concluded_at=None)
        tenants = list(old.order_by().values_list("tenant_id", flat=True).distinct())
    num_deleted = 0
    for schedule_id, tenant_id in full:
        with tenant_scope(tenant_id):
            rows = ScheduleRun.objects.filter(schedule_id=schedule_id)
            last = rows.order_by("-slot").values_list("slot", flat=True)[MAX_OF_SCHEDULE - 1]
            num_deleted += rows.filter(slot__lt=last).exclude(concluded_at=None).delete()[0]
    for tenant_id in tenants:
        with tenant_scope(tenant_id):
            num_deleted += old.delete()[0]
    return num_deleted


def _count(outcome: str, number: int = 1) -> None:
    transaction.on_commit(lambda: SCHEDULE_SLOTS.labels(outcome).inc(number))
