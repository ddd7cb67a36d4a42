"""Delete the tenants whose grace period is over; continue where a killed task stopped."""

from __future__ import annotations

import datetime as dt
import logging
import uuid

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.deletion import steps
from controlplane.deletion.models import TenantDeletion
from controlplane.events.audit.services import record, record_named
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import Tenant

log = logging.getLogger(__name__)

Status = TenantDeletion.Status

#: Silence after which a task counts as killed, and another one continues.
LEASE = dt.timedelta(minutes=2)
#: Time after its end during which a deletion looks for late data.
LATE = dt.timedelta(days=2)
#: Interval of these looks, each of them a pass over the names of all keys in Redis.
LATE_EVERY = dt.timedelta(hours=1)


class _LeaseLost(Exception):
    """Another task has taken the deletion over."""


def tenants_delete(now: dt.datetime | None = None) -> int:
    """Work on the deletions that are due. -> how many were finished."""
    now = now or timezone.now()
    due = Q(status__in=TenantDeletion.OPEN, due_at__lte=now)
    num_done = 0
    for deletion_id in TenantDeletion.objects.filter(due).values_list("pk", flat=True):
        num_done += _delete(deletion_id)
    _look_for_what_came_late(now)
    return num_done


def _look_for_what_came_late(now: dt.datetime) -> None:
    ended = Q(status=Status.DONE, finished_at__gt=now - LATE, finished_at__lt=now)
    is_due = Q(lease_until=None) | Q(lease_until__lte=now)
    for deletion in TenantDeletion.objects.filter(ended, is_due):
        rows = TenantDeletion.objects.filter(is_due, pk=deletion.pk)
        if rows.update(lease_until=now + LATE_EVERY):  # else another task was faster
            deletion.lease_until = None
            _try(deletion, steps.LATE_STEPS)


def _delete(deletion_id: uuid.UUID) -> bool:
    deletion = _claim(deletion_id)
    if deletion is None:
        return False
    log.info("the deletion of a tenant continues", extra={"deletion_id": str(deletion.pk)})
    left = [name for name in steps.STEPS if name not in deletion.steps]
    if not _try(deletion, left):
        return False
    _finish(deletion)
    return True


def _try(deletion: TenantDeletion, names: list[str] | tuple[str, ...]) -> bool:
    """Run steps until one fails or waits. -> whether all are done."""
    lease = {"until": deletion.lease_until}

    def beat() -> None:
        if lease["until"] is None:  # a search for late data needs no lease
            return
        until = timezone.now() + LEASE
        held = TenantDeletion.objects.filter(pk=deletion.pk, lease_until=lease["until"])
        if not held.update(lease_until=until):
            raise _LeaseLost
        lease["until"] = until

    try:
        for name in names:
            beat()
            steps.run_step(name, deletion, beat)
            if name not in deletion.steps:
                deletion.steps.append(name)
                deletion.save(update_fields=["steps"])
    except steps.NotYet:
        error = ""
    except _LeaseLost:
        return False
    except Exception as caught:  # the next turn tries again
        log.exception("the deletion of a tenant waits", extra={"deletion_id": str(deletion.pk)})
        error = repr(caught)[:500]
    else:
        return True
    free = TenantDeletion.objects.filter(pk=deletion.pk, lease_until=lease["until"])
    free.update(error=error, lease_until=None)
    return False


@transaction.atomic
def _claim(deletion_id: uuid.UUID) -> TenantDeletion | None:
    """Take the deletion; None when another task has it or it was restored."""
    now = timezone.now()
    free = Q(lease_until=None) | Q(lease_until__lte=now)
    rows = TenantDeletion.objects.select_for_update(skip_locked=True)
    deletion = rows.filter(free, pk=deletion_id, status__in=TenantDeletion.OPEN).first()
    if deletion is None:
        return None
    deletion.status = Status.RUNNING
    deletion.started_at = deletion.started_at or now
    deletion.lease_until = now + LEASE
    deletion.save(update_fields=["status", "started_at", "lease_until"])
    return deletion


@transaction.atomic
def _finish(deletion: TenantDeletion) -> None:
    after = {"slug": deletion.slug, "counts": deletion.counts, "num_bytes": deletion.num_bytes}
    running = TenantDeletion.objects.filter(pk=deletion.pk, status=Status.RUNNING)
    if not running.update(
        status=Status.DONE, finished_at=timezone.now(), lease_until=None, error=""
    ):
        return
    record("deleted", Tenant.objects.get(pk=deletion.tenant_id), after=after)
    with all_tenants(reason="the platform's own trail"):
        record_named("finished", "tenant_deletion", str(deletion.pk), after=after)
    log.info("a tenant is deleted", extra={"deletion_id": str(deletion.pk)})
