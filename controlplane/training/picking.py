"""Choose the queued run to start next. A tenant's runs above its quota wait."""

from __future__ import annotations

import datetime as dt

from django.conf import settings
from django.db.models import Count, F, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from django.utils import timezone

from controlplane.limits import quotas, turns
from controlplane.limits.models import Turn
from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingRun

Status = TrainingRun.Status


def next_run() -> TrainingRun | None:
    """Return the run to start next, of all tenants; None when none may start."""
    with all_tenants(reason="the next run is chosen among all tenants"):
        return turns.next_of(Turn.Kind.TRAINING, runs_that_may_begin())


def runs_that_may_begin() -> QuerySet[TrainingRun]:
    """Return queued runs, in the current scope, of tenants that may start another run.

    Outside the training window there are none.
    """
    queued = TrainingRun.objects.filter(status=Status.QUEUED, cancel_requested=False)
    runs = queued.annotate(
        tenants_running=num_of_tenant(Status.RUNNING),
        tenants_most=quotas.allowed_to_each("training_at_once"),
    ).filter(tenants_running__lt=F("tenants_most"))
    return runs if window_opens_at() is None else runs.none()


def window_opens_at() -> dt.datetime | None:
    """Return when runs may begin again; None if they may now."""
    now, window = timezone.now(), settings.TRAINING_WINDOW
    return None if window is None or window.is_open(now) else window.opens_at(now)


def num_of_tenant(*statuses: str) -> Coalesce:
    """Return an expression for a query over all tenants: the row's tenant's runs in `statuses`."""
    rows = TrainingRun.objects.filter(tenant_id=OuterRef("tenant_id"), status__in=statuses)
    counts = rows.order_by().values("tenant_id").annotate(num=Count("pk")).values("num")
    return Coalesce(Subquery(counts), Value(0))
