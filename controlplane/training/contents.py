"""The rows of datasets in the object store: counted before the upload, removed when not needed.

Two datasets, or two uploads of one, may have the same rows: these share one object.
"""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet, Sum
from django.utils import timezone

from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.limits import quotas
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training.models import Dataset, DatasetContent, TrainingRun, dataset_key

#: An upload from `content_begin` to its dataset's row never takes longer than this.
KEPT = dt.timedelta(hours=1)
#: Removed in one sweep; the next one continues.
MAX_PER_TURN = 500


def num_bytes() -> int:
    """Return the bytes of all contents of the tenant in scope."""
    return int(DatasetContent.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0)


@transaction.atomic
def content_begin(tenant_id: uuid.UUID, sha256: str, num_bytes: int) -> None:
    """Reserve room for rows before their upload. Raises InvalidRequest when there is none."""
    quotas.lock("storage_bytes")
    _lock(tenant_id, sha256)
    rows = DatasetContent.objects.filter(sha256=sha256)
    now = timezone.now()
    if not rows.update(wanted_at=now, num_bytes=num_bytes):
        quotas.check("storage_bytes", num_bytes)
        DatasetContent.objects.create(sha256=sha256, num_bytes=num_bytes, wanted_at=now)


def contents_sweep() -> int:
    """Remove contents of all tenants that no dataset names and no run will read. -> how many.

    Raises storage.STORAGE_ERRORS; the next sweep begins with those that are left.
    """
    with all_tenants(reason="find replaced rows of all tenants"):
        due = list(_unread().order_by("wanted_at")[:MAX_PER_TURN])
    num_removed = 0
    for content in due:
        with tenant_scope(content.tenant_id), transaction.atomic():
            # Nobody can upload it between query and removal: `content_begin` takes the lock, too.
            _lock(content.tenant_id, content.sha256)
            if _unread().filter(pk=content.pk).exists():
                storage.delete([dataset_key(content.tenant_id, content.sha256)])
                content.delete()
                num_removed += 1
    return num_removed


def _unread() -> QuerySet[DatasetContent]:
    of_it = {"tenant_id": OuterRef("tenant_id")}
    named = Dataset.objects.filter(**of_it, sha256=OuterRef("sha256"))
    read = TrainingRun.objects.filter(
        **of_it, dataset_sha256=OuterRef("sha256"), status__in=TrainingRun.ACTIVE
    )
    old = DatasetContent.objects.filter(wanted_at__lt=timezone.now() - KEPT)
    return old.filter(~Exists(named), ~Exists(read))


def _lock(tenant_id: uuid.UUID, sha256: str) -> None:
    lock_until_commit(f"dataset {tenant_id} {sha256}")
