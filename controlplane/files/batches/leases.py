"""Leases of runners on batches."""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from collections.abc import Collection, Iterator
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.files.batches.models import Batch
from controlplane.tenancy.row_lease import LeaseLost, RowLease
from controlplane.tenancy.scoping import all_tenants, tenant_scope

#: Time without a renewal after which another runner takes the batch up.
LEASE = dt.timedelta(seconds=30)
RENEW_S = 2.0
#: Largest number of a tenant's batches that a pool works on at a time.
MAX_TENANT_RUNNING = 4


class Lease(RowLease[Batch]):
    """A runner's lease on a batch. Every write of its results goes through `held`."""

    @contextlib.contextmanager
    def held(self) -> Iterator[Batch]:
        """Lock the batch's row in a transaction and in its tenant's scope.

        Raises LeaseLost when the lease is somebody else's.
        """
        with tenant_scope(self.tenant_id), transaction.atomic():
            batch = self.rows(*Batch.ACTIVE).select_for_update().first()
            if batch is None:
                raise LeaseLost
            yield batch

    def renew(self) -> Batch:
        """Renew the lease and read the batch. Raises LeaseLost."""
        with tenant_scope(self.tenant_id):
            rows = self.rows(*Batch.ACTIVE)
            if not self.extend(rows, LEASE):
                raise LeaseLost
            return rows.get()

    def release(self) -> None:
        """Let another runner take the batch up at once."""
        with tenant_scope(self.tenant_id):
            self.rows(*Batch.ACTIVE).update(lease_until=None)


def claim(but_not: Collection[uuid.UUID] = ()) -> Lease | None:
    """Lease the pool's next batch; None when there is none.

    Tenants with the fewest running batches come first, and of each its oldest batch.

    but_not  batches that the runner works on: it renews their leases, even lapsed ones, itself
    """
    now = timezone.now()
    is_free = Q(lease_until=None) | Q(lease_until__lte=now)
    with all_tenants(reason="batches of every tenant are run"):
        active = Batch.objects.filter(status__in=Batch.ACTIVE, pool__in=(settings.POOL, ""))
        running = _count_by_tenant(active.filter(lease_until__gt=now))
        full = [tenant for tenant, num in running.items() if num >= MAX_TENANT_RUNNING]
        free = active.filter(is_free).exclude(tenant_id__in=full).exclude(pk__in=but_not)
        waiting = list(free.order_by("tenant_id", "pk").distinct("tenant_id"))
    for batch in sorted(waiting, key=lambda batch: (running.get(batch.tenant_id, 0), batch.pk)):
        with tenant_scope(batch.tenant_id):
            rows = Batch.objects.filter(is_free, pk=batch.pk, fence=batch.fence)
            if Lease.take(rows, LEASE, pool=settings.POOL):
                batch.fence += 1
                return Lease(batch)
    return None


def _count_by_tenant(rows: Any) -> dict[uuid.UUID, int]:
    return {
        row["tenant_id"]: row["num"] for row in rows.values("tenant_id").annotate(num=Count("id"))
    }
