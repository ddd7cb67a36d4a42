"""Start a training run for every schedule that is due.

A slot fires exactly once: the schedule's row is locked while its run is made and its next slot set,
and (schedule, slot) is unique. Slots that were missed, because the platform was down, the adapter's
last run had not ended, or the tenant had reached its quota, fire as one. A schedule of a base model
that is switched off or shut down does not fire.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid

from django.db import transaction
from django.db.models import Exists, F, OuterRef, QuerySet, Window
from django.db.models.functions import RowNumber
from django.utils import timezone

from controlplane.adapters.models import is_serving
from controlplane.audit.services import record
from controlplane.errors import RateLimited
from controlplane.limits import quotas
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training import cron, picking, services
from controlplane.training.models import Schedule, ScheduleRun, TrainingRun

log = logging.getLogger(__name__)

#: The most schedules that one tick fires; the next tick continues.
MAX_PER_TICK = 500


def schedules_fire(now: dt.datetime | None = None) -> int:
    """Fire the schedules that are due at `now` (default: the present). -> how many runs were made.

    Any number of calls may run at the same time.
    """
    now = now or timezone.now()
    with all_tenants(reason="find the due schedules of all tenants"):
        # The first of each tenant, then the second: a tenant with many does not delay others.
        own = Window(RowNumber(), partition_by="tenant_id", order_by="next_run_at")
        rows = _due(now).annotate(place=own).order_by("place", "next_run_at")
        due = list(rows.values_list("pk", "tenant_id")[:MAX_PER_TICK])
    num_fired = 0
    for schedule_id, tenant_id in due:
        with tenant_scope(tenant_id):
            try:
                num_fired += _fire(schedule_id, now)
            except RateLimited:
                log.info("a schedule waits", extra={"schedule_id": str(schedule_id)})
            except Exception:  # continue with the others
                log.exception("a schedule failed", extra={"schedule_id": str(schedule_id)})
    return num_fired


def _due(now: dt.datetime) -> QuerySet[Schedule]:
    going = TrainingRun.objects.filter(
        adapter_id=OuterRef("adapter_id"), status__in=TrainingRun.ACTIVE
    )
    due = Schedule.objects.annotate(
        tenants_runs=picking.num_of_tenant(*TrainingRun.ACTIVE),
        tenants_most=quotas.allowed_to_each("training_runs"),
    )
    return due.filter(
        ~Exists(going),
        is_serving("adapter__base_model__"),
        tenants_runs__lt=F("tenants_most"),
        next_run_at__lte=now,
        is_paused=False,
        tenant__status=Tenant.Status.ACTIVE,
    )


@transaction.atomic
def _fire(schedule_id: uuid.UUID, now: dt.datetime) -> bool:
    """Start the schedule's run and set its next slot. -> False if another tick does or did it."""
    schedule = (
        _due(now)
        .filter(pk=schedule_id)
        .select_related("adapter", "dataset")
        .select_for_update(of=("self",), skip_locked=True)
        .first()
    )
    if schedule is None:
        return False
    slot = schedule.next_run_at
    try:
        schedule.next_run_at = cron.next_slot(schedule.cron, schedule.timezone, now)
    except ValueError:  # the line was valid when set: the time zone database has changed since
        log.exception("a schedule was paused", extra={"schedule_id": str(schedule_id)})
        schedule.is_paused = True
        schedule.save(update_fields=["is_paused"])
        record("paused", schedule, after={"reason": "its cron line or time zone is now invalid"})
        return False
    schedule.save(update_fields=["next_run_at"])
    run = services.training_run_enqueue(
        adapter=schedule.adapter,
        dataset=schedule.dataset,
        hyperparameters=schedule.hyperparameters,
    )
    ScheduleRun.objects.create(schedule=schedule, slot=slot, training_run=run)
    log.info("schedule fired", extra={"schedule_id": str(schedule_id), "run_id": str(run.pk)})
    return True
