"""Choose the queued run to start next, and claim it. A tenant's runs above its quota wait.

The trainer that moves a run from queued to running owns it, under the number of that attempt; every
later write checks both. So a message that is delivered twice trains once, and a trainer that was
considered lost changes nothing when it comes back.
"""

from __future__ import annotations

import datetime as dt
import uuid

from django.conf import settings
from django.db import transaction
from django.db.models import BigIntegerField, Count, F, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training.models import TrainingRun
from controlplane.training.runs.events import event_add
from controlplane.training.runs.lease import RUNNING_LEASE, RunLease
from controlplane.usage.limits import quotas, turns
from controlplane.usage.limits.models import Turn
from controlplane.usage.models import TrainingUsage

Status = TrainingRun.Status

#: Number of lost trainers in a row from which a run is trained alone: it may be the reason.
LOST_TOGETHER = 2
#: Attempts lost in a row without progress -> seconds from the beginning of the last to the next, so
#: that a run is not given up for losses of trainers within a minute.
WAITS_S = {3: 30, 4: 60, 5: 120}
#: Time for which a tenant's device seconds count.
QUOTA_WINDOW = dt.timedelta(hours=24)
#: Number of times that a trainer chooses again when another one was faster.
_MAX_TRIES = 100


def run_claim_next(
    *, beside: TrainingRun | None = None, in_turn: bool = False
) -> TrainingRun | None:
    """Take the run that is next, `next_run`, for this trainer; None: there is none.

    in_turn  only if it is the next of all, too: `next_to_join`
    """
    for _ in range(_MAX_TRIES):
        if beside is not None and in_turn:
            run = next_to_join(beside)
        else:
            run = next_run(beside=beside)
        if run is None:
            return None
        with tenant_scope(run.tenant_id):
            claimed = run_claim(run.pk)
        if claimed is not None:  # else another trainer was faster
            return claimed
    return None


@transaction.atomic
def run_claim(run_id: uuid.UUID) -> TrainingRun | None:
    """Take a queued run of the tenant in scope; None: it may not begin now."""
    quotas.lock("training_at_once")  # two runs that begin at the same time count each other
    if not runs_that_may_begin().filter(pk=run_id).exists():
        return None
    queued = TrainingRun.objects.filter(
        pk=run_id, status=Status.QUEUED, cancel_requested=False, pause_requested=False
    )
    taken = RunLease.take(
        queued, RUNNING_LEASE, status=Status.RUNNING, started_at=timezone.now(), progress={}
    )
    if not taken:
        return None
    turns.taken(Turn.Kind.TRAINING)
    related = ("adapter__base_model", "created_by", "dataset", "warm_start")
    run = TrainingRun.objects.select_related(*related).get(pk=run_id)
    event_add(run, "Fine-tuning job started", attempt=run.attempts)
    return run


def next_run(*, beside: TrainingRun | None = None) -> TrainingRun | None:
    """Return the run to start next, of all tenants; None when none may start.

    beside  a run with which it will be trained: another one of the same base model
    """
    with all_tenants(reason="the next run is chosen among all tenants"):
        runs = runs_that_may_begin()
        if beside is not None:
            same = {"adapter__base_model_id": beside.adapter.base_model_id}
            runs = runs.filter(**same, num_lost__lt=LOST_TOGETHER)
        return turns.next_of(Turn.Kind.TRAINING, runs)


def next_to_join(beside: TrainingRun) -> TrainingRun | None:
    """Return the run to start next, of all tenants, if it may be trained with `beside`.

    None also if the next one has another base model, or must be trained alone: it must not wait
    longer because later runs join a batch.
    """
    with all_tenants(reason="the next run is chosen among all tenants"):
        runs = runs_that_may_begin().select_related("adapter")
        run = turns.next_of(Turn.Kind.TRAINING, runs)
    if run is None or run.num_lost >= LOST_TOGETHER:
        return None
    is_same = run.adapter.base_model_id == beside.adapter.base_model_id
    return run if is_same else None


def runs_that_may_begin() -> QuerySet[TrainingRun]:
    """Return queued runs, in the current scope, of tenants that may start another run.

    Outside the training window there are none.
    """
    if window_opens_at() is not None:
        return TrainingRun.objects.none()
    # Computed once for each tenant, not for each run.
    with_room = Tenant.objects.annotate(
        num_running=num_of_tenant(Status.RUNNING, tenant="pk"),
        most_running=quotas.allowed_to_each("training_at_once", tenant="pk"),
    ).filter(num_running__lt=F("most_running"))
    spent = tenants_that_spent().values("pk")
    runs = _queued().filter(tenant_id__in=with_room.values("pk")).exclude(tenant_id__in=spent)
    return runs.exclude(_waits_after_losses())


def _waits_after_losses() -> Q:
    now, waits = timezone.now(), Q(pk__in=[])
    for num_lost, wait_s in WAITS_S.items():
        waits |= Q(num_lost=num_lost, started_at__gt=now - dt.timedelta(seconds=wait_s))
    return waits


def _queued() -> QuerySet[TrainingRun]:
    return TrainingRun.objects.filter(
        status=Status.QUEUED, cancel_requested=False, pause_requested=False
    )


def some_that_may_begin(most: int) -> list[TrainingRun]:
    """Return up to this number of queued runs, in the current scope, that may begin."""
    active = runs_that_may_begin().filter(tenant__status=Tenant.Status.ACTIVE)
    return list(active.order_by()[:most])


def tenants_that_spent() -> QuerySet[Tenant]:
    """Return the tenants whose trainings used up their device seconds; their runs wait."""
    since = timezone.now() - QUOTA_WINDOW
    rows = TrainingUsage.objects.filter(tenant_id=OuterRef("pk"), occurred_at__gt=since)
    used = rows.order_by().values("tenant_id").annotate(sum=Sum("device_ms")).values("sum")
    waiting = TrainingRun.objects.filter(status=Status.QUEUED).order_by().values("tenant_id")
    return (
        Tenant.objects.filter(pk__in=waiting)
        .annotate(
            used_ms=Coalesce(Subquery(used), Value(0), output_field=BigIntegerField()),
            most_s=quotas.allowed_to_each("training_device_seconds", tenant="pk"),
        )
        .filter(used_ms__gte=F("most_s") * 1000)
    )


def first_that_wait_for_quota() -> QuerySet[TrainingRun]:
    """Return the oldest queued run of each tenant that used up its device seconds."""
    runs = _queued().filter(tenant_id__in=tenants_that_spent().values("pk"))
    return runs.order_by("tenant_id", "created_at").distinct("tenant_id")


def device_seconds_used() -> int:
    """Return the device seconds that the tenant in scope used in the last 24 hours."""
    since = timezone.now() - QUOTA_WINDOW
    rows = TrainingUsage.objects.filter(occurred_at__gt=since)
    return int(rows.aggregate(sum=Sum("device_ms", default=0))["sum"] // 1000)


def window_opens_at() -> dt.datetime | None:
    """Return when runs may begin again; None if they may now."""
    now, window = timezone.now(), settings.TRAINING_WINDOW
    return None if window is None or window.is_open(now) else window.opens_at(now)


def num_of_tenant(*statuses: str, tenant: str = "tenant_id") -> Coalesce:
    """Return an expression for a query over all tenants: the row's tenant's runs in `statuses`.

    tenant  the field that has the tenant's id
    """
    rows = TrainingRun.objects.filter(tenant_id=OuterRef(tenant), status__in=statuses)
    counts = rows.order_by().values("tenant_id").annotate(num=Count("pk")).values("num")
    return Coalesce(Subquery(counts), Value(0))
