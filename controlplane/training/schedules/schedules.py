"""Start a training run for every schedule that is due, and note the outcome of each slot.

A slot fires exactly once: the schedule's row is locked while its run is made, its history written
and its next slot set, in one transaction; and (schedule, slot) is unique. A slot waits while the
adapter's last run is active, the tenant's quota is used up, or the window is closed. Within the
schedule's grace period it is on time; of several the newest runs. Later it is missed, which is
published at once; with the policy `run_once` the newest missed slot runs when it may. A schedule of
a base model that is switched off or shut down does not fire.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Sequence

from django.db import transaction
from django.db.models import (
    DateTimeField,
    Exists,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Window,
)
from django.db.models.functions import RowNumber
from django.utils import timezone

from controlplane.adapters.models import is_serving
from controlplane.errors import Conflict, RateLimited, require
from controlplane.events.audit.services import record
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant, User
from controlplane.training import cron
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun
from controlplane.training.runs import picking
from controlplane.training.schedules import history
from controlplane.training.schedules.schedule_rules import plan, window_of
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

#: Number of schedules that one tick handles; the next tick continues.
MAX_PER_TICK = 500
#: Number of an outage's newest slots that are in the history.
MAX_SLOTS = 60
_DAY = dt.timedelta(days=1)
_RELATED = ("adapter", "dataset", "validation_dataset")

Reason = ScheduleRun.Reason


def schedules_fire(now: dt.datetime | None = None) -> int:
    """Fire the schedules that are due at `now` (default: the present). -> the number of runs made.

    Slots that are missed are noted, too. Any number of calls may run at the same time.
    """
    now = now or timezone.now()
    with all_tenants(reason="find the due schedules of all tenants"):
        # The first of each tenant, then the second: a tenant with many does not delay others.
        own = Window(RowNumber(), partition_by="tenant_id", order_by="next_run_at")
        due = [
            pair
            for rows in (_free(_due(now), now), _overdue(now))
            for pair in rows.annotate(place=own)
            .order_by("place", "next_run_at")
            .values_list("pk", "tenant_id")[:MAX_PER_TICK]
        ]
    num_fired = 0
    for schedule_id, tenant_id in dict.fromkeys(due):
        with tenant_scope(tenant_id):
            try:
                num_fired += _fire(schedule_id, now)
            except RateLimited:
                log.info("a schedule waits", extra={"schedule_id": str(schedule_id)})
            except Exception:  # continue with the others
                log.exception("a schedule failed", extra={"schedule_id": str(schedule_id)})
    return num_fired


def _active() -> QuerySet[Schedule]:
    return Schedule.objects.filter(is_paused=False, tenant__status=Tenant.Status.ACTIVE)


def _due(now: dt.datetime) -> QuerySet[Schedule]:
    return _active().filter(Q(next_run_at__lte=now) | Q(owed_slot__isnull=False))


def _overdue(now: dt.datetime) -> QuerySet[Schedule]:
    """Return schedules whose slot can no longer run on time."""
    ends = ExpressionWrapper(F("next_run_at") + F("grace"), output_field=DateTimeField())
    return _active().annotate(late_at=ends).filter(late_at__lt=now)


def _free(rows: QuerySet[Schedule], now: dt.datetime) -> QuerySet[Schedule]:
    """Return the schedules that may make a run now, by the database's rows."""
    rows = rows.annotate(
        tenants_runs=picking.num_of_tenant(*TrainingRun.ACTIVE),
        tenants_most=quotas.allowed_to_each("training_runs"),
    )
    return rows.filter(
        ~Exists(_going()),
        is_serving("adapter__base_model__"),
        Q(not_before=None) | Q(not_before__lte=now),
        tenants_runs__lt=F("tenants_most"),
    )


def _going() -> QuerySet[TrainingRun]:
    """Return, for a query over schedules, the runs of the adapter that have not ended."""
    return TrainingRun.objects.filter(
        adapter_id=OuterRef("adapter_id"), status__in=TrainingRun.ACTIVE
    )


@transaction.atomic
def _fire(schedule_id: uuid.UUID, now: dt.datetime) -> bool:
    """Decide about the schedule's due slots. -> whether a run was made.

    Does nothing if another tick handles the schedule.
    """
    schedule = (
        _due(now)
        .filter(pk=schedule_id)
        .select_related(*_RELATED)
        .select_for_update(of=("self",), skip_locked=True)
        .first()
    )
    if schedule is None:
        return False
    try:
        slots = _slots(schedule, now)
        keeps = _what_keeps(schedule, now)
        found = plan(
            slots,
            now,
            is_free=keeps is None,
            grace=schedule.grace,
            misfire=schedule.misfire,
            owed=schedule.owed_slot,
        )
        if slots and not found.waits:
            schedule.next_run_at = cron.next_slot(schedule.cron, schedule.timezone, slots[-1])
        elif found.waits:
            schedule.next_run_at = found.waits[0]
    except ValueError:  # the line was valid when set: the time zone database has changed
        _pause(schedule)
        return False
    schedule.owed_slot = found.owed
    schedule.save(update_fields=["next_run_at", "owed_slot", "not_before"])
    history.slots_note(schedule, found.merged, Reason.MERGED, now)
    history.slots_note(schedule, found.missed, keeps or Reason.LATE, now)
    return found.fire is not None and _make(schedule, found.fire, now)


def _slots(schedule: Schedule, now: dt.datetime) -> Sequence[dt.datetime]:
    """Return the slots that are due and not in the history yet."""
    first, line = schedule.next_run_at, (schedule.cron, schedule.timezone)
    slots = cron.slots_until(*line, first, now, most=MAX_SLOTS)
    # After a clock went back, a schedule set then names a slot again.
    known = set(schedule.runs.filter(slot__in=slots).values_list("slot", flat=True))
    if slots and known.issuperset(slots):
        schedule.next_run_at = cron.next_slot(*line, slots[-1])
    return [slot for slot in slots if slot not in known]


def _what_keeps(schedule: Schedule, now: dt.datetime) -> Reason | None:
    """Return why no run may be made now; set the time when the window opens."""
    window = window_of(schedule.window, schedule.timezone)
    is_open = window is None or window.is_open(now)
    schedule.not_before = None if window is None or is_open else window.opens_at(now)
    if not is_open:
        return Reason.WINDOW
    row = Schedule.objects.filter(pk=schedule.pk)
    if not row.filter(is_serving("adapter__base_model__")).exists():
        return Reason.BASE_MODEL
    if row.filter(Exists(_going())).exists():
        return Reason.BUSY
    return None if _free(row, now).exists() else Reason.QUOTA


def _pause(schedule: Schedule) -> None:
    log.exception("a schedule was paused", extra={"schedule_id": str(schedule.pk)})
    Schedule.objects.filter(pk=schedule.pk).update(is_paused=True)
    record("paused", schedule, after={"reason": "its cron line or time zone is now invalid"})


def _make(schedule: Schedule, slot: dt.datetime, now: dt.datetime) -> bool:
    """Make the run of a slot, unless nothing is new. -> whether there is one now."""
    if schedule.skip_unchanged and _is_unchanged(schedule):
        history.slots_note(schedule, [slot], Reason.UNCHANGED, now)
        return False
    most = schedule.max_runs_per_day
    ran = schedule.runs.filter(
        training_run__isnull=False, trigger=ScheduleRun.Trigger.CLOCK, slot__gt=now - _DAY
    )
    if most is not None and ran.count() >= most:
        history.slots_note(schedule, [slot], Reason.DAY, now)
        return False
    row = history.slot_run(schedule, slot, ScheduleRun.Trigger.CLOCK)
    extra = {"schedule_id": str(schedule.pk), "run_id": str(row.training_run_id)}
    log.info("schedule fired", extra=extra)
    return True


def _is_unchanged(schedule: Schedule) -> bool:
    """Return whether the adapter's last run that succeeded had these rows and settings."""
    last = history.last_run(schedule)
    validation = schedule.validation_dataset
    return last is not None and (
        last.dataset_sha256 == schedule.dataset.sha256
        and last.validation_sha256 == (validation.sha256 if validation else "")
        and last.hyperparameters == schedule.hyperparameters
        and not last.warm_start_name
    )


def windows_close(now: dt.datetime | None = None) -> int:
    """Cancel runs of schedules that did not begin before their window closed. -> their number."""
    now = now or timezone.now()
    with all_tenants(reason="find runs whose schedule's window has closed"):
        waiting = ScheduleRun.objects.filter(
            training_run__status=TrainingRun.Status.QUEUED,
            training_run__attempts=0,
            trigger=ScheduleRun.Trigger.CLOCK,
        ).exclude(schedule__window="")
        found = list(waiting.select_related("schedule").order_by("slot")[:MAX_PER_TICK])
    num_closed = 0
    for row in found:
        window = window_of(row.schedule.window, row.schedule.timezone)
        if window is None or window.is_open(now):
            continue
        with tenant_scope(row.tenant_id):
            num_closed += history.run_drop(row.pk, now)
    return num_closed


@transaction.atomic
def schedule_run_now(schedule: Schedule, *, created_by: User | None = None) -> ScheduleRun:
    """Start the schedule's run now, regardless of its rules; its slots stay as they are.

    Raises Conflict if the adapter has an active run or its base model was shut down,
    RateLimited when the tenant has too many runs, NotFound when the schedule is gone.
    """
    rows = Schedule.objects.filter(pk=schedule.pk)
    found = rows.select_related(*_RELATED).select_for_update(of=("self",)).first()
    found = require(found, "The adapter has no schedule.")
    if rows.filter(Exists(_going())).exists():
        raise Conflict(
            "A training run of the adapter has not ended: wait, or cancel it.", code="run_active"
        )
    if not rows.filter(is_serving("adapter__base_model__")).exists():
        raise Conflict("Its base model is switched off or was shut down.", code="base_model_off")
    row = history.slot_run(found, timezone.now(), ScheduleRun.Trigger.MANUAL, created_by=created_by)
    record("run_now", found, after={"run": str(row.training_run_id)})
    return row
