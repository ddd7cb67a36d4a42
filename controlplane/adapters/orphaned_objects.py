"""Remove objects of versions from the object store when nobody will read them.

There are three kinds. A client's URL works for a while after its version was decided, and a PUT
that began in time may take long: objects in a staging area whose version is decided are removed in
the next sweep. Checked bytes are stored before their version is ready, which it may never be. And
nothing reads the files of versions that were retired long ago. The staging areas are listed; all
other objects are found by their version's row, which is written first. An object of a version that
this installation does not know is never touched.
"""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.adapters.models import AdapterVersion, DeletedVersion, VersionUpload
from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import all_tenants, tenant_scope

Status = AdapterVersion.Status

_ENDED = (Status.READY, Status.REJECTED, Status.RETIRED)

#: Time after a version was decided its URLs have expired, and uploads to them have ended.
AFTER = dt.timedelta(days=1)
#: Versions in one sweep; the next one continues.
MAX_PER_TURN = 500
#: A rejected version counts in its tenant's storage for this time: its URLs work for half of it.
REJECTED_COUNTS = dt.timedelta(minutes=30)
#: Staging areas are listed for this time after the status of their tenant's last version changed.
_WATCHED = dt.timedelta(days=30)
#: Requests that were accepted before a version was retired, also a batch's, have ended by then.
RETIRED_KEPT = dt.timedelta(days=2)


def versions_clear() -> int:
    """Remove the staged and unneeded checked files of decided versions. -> how many versions.

    Raises storage.STORAGE_ERRORS; the next sweep begins with those that are left.
    """
    with all_tenants(reason="find orphaned objects of all tenants"):
        rows = AdapterVersion.objects.filter(
            is_cleared=False, status__in=_ENDED, status_changed_at__lt=timezone.now() - AFTER
        )
        found = list(rows.order_by("status_changed_at")[:MAX_PER_TURN])
    for version in found:
        with tenant_scope(version.tenant_id):
            staging_clear(version)
            if version.kept_digest:
                kept_forget(version, version.kept_digest)
            AdapterVersion.objects.filter(pk=version.pk).update(is_cleared=True)
    return len(found)


def staging_sweep() -> int:
    """Remove objects that were staged after their version was decided. -> how many objects.

    Raises storage.STORAGE_ERRORS.
    """
    with all_tenants(reason="find late uploads of all tenants"):
        rows = AdapterVersion.objects.filter(status_changed_at__gt=timezone.now() - _WATCHED)
        tenants = set(rows.values_list("tenant_id", flat=True).distinct())
        tenants |= set(DeletedVersion.objects.values_list("tenant_id", flat=True).distinct())
    num_removed = 0
    for tenant_id in tenants:
        prefix = f"t/{tenant_id}/u/"
        late = [key for key in storage.keys(prefix) if _is_late(tenant_id, key[len(prefix) :])]
        storage.delete(late)
        num_removed += len(late) + _abort_late(tenant_id, prefix)
    return num_removed


def _abort_late(tenant_id: uuid.UUID, prefix: str) -> int:
    """Abort multipart uploads of decided versions: a part may have arrived after the decision."""
    keys = {upload["Key"] for upload in storage.unfinished_writes(prefix)}
    late = [key for key in keys if _is_late(tenant_id, key[len(prefix) :])]
    return sum(storage.abort_parts(key) for key in late)


def _is_late(tenant_id: uuid.UUID, name: str) -> bool:
    """Return whether a staged file, by its name in the area, belongs to a decided version."""
    try:
        version_id = uuid.UUID(name.partition("/")[0])
    except ValueError:
        return False
    with tenant_scope(tenant_id):
        decided = AdapterVersion.objects.filter(pk=version_id, status__in=_ENDED)
        deleted = DeletedVersion.objects.filter(version_id=version_id)
        return decided.exists() or deleted.exists()


def retired_remove() -> int:
    """Remove the files of versions that were retired long enough ago. -> how many versions.

    Raises storage.STORAGE_ERRORS; the next sweep begins with those that are left.
    """
    with all_tenants(reason="find retired versions of all tenants"):
        rows = AdapterVersion.objects.filter(
            status=Status.RETIRED,
            removed_at=None,
            status_changed_at__lt=timezone.now() - RETIRED_KEPT,
        )
        found = list(rows.order_by("status_changed_at")[:MAX_PER_TURN])
    for version in found:
        with tenant_scope(version.tenant_id), transaction.atomic():
            row = AdapterVersion.objects.filter(pk=version.pk, status=Status.RETIRED)
            if row.update(removed_at=timezone.now()):  # else it was taken back in between
                remove_unless_used(version.tenant_id, version.digest)
    return len(found)


def staging_clear(version: AdapterVersion) -> None:
    """Remove a version's staged files, whole or in parts. Raises storage.STORAGE_ERRORS."""
    storage.abort_parts(version.staging_prefix)
    storage.delete([version.staged_config_key, version.staged_tensors_key])
    VersionUpload.objects.filter(version_id=version.pk).delete()


def kept_note(version: AdapterVersion) -> bool:
    """Note in the row, before checked bytes are stored, that they will be at `version.digest`.

    -> False when the version is no longer being checked: then do not store them.
    """
    row = AdapterVersion.objects.filter(pk=version.pk, status=Status.VALIDATING)
    earlier = row.values_list("kept_digest", flat=True).first() or version.digest
    if earlier != version.digest:  # the client has uploaded other files since
        kept_forget(version, earlier)
    with transaction.atomic():
        _lock(version.tenant_id, version.digest)
        return row.update(kept_digest=version.digest) == 1


def is_kept(version: AdapterVersion) -> bool:
    """Return whether the checked bytes at `version.digest` are still there.

    Call it in the transaction that makes the version ready.
    """
    rows = AdapterVersion.objects.select_for_update().filter(pk=version.pk)
    return rows.filter(kept_digest=version.digest).exists()


def kept_forget(version: AdapterVersion, digest: str) -> None:
    """Remove a version's checked bytes at a digest, unless another version needs them.

    Such a version is ready, or is being checked.
    """
    with transaction.atomic():
        remove_unless_used(version.tenant_id, digest, except_of=version)
        row = AdapterVersion.objects.filter(pk=version.pk, kept_digest=digest)
        row.update(kept_digest="")


def remove_unless_used(
    tenant_id: uuid.UUID, digest: str, *, except_of: AdapterVersion | None = None
) -> None:
    """Remove the tenant's bytes at a digest, unless a version is ready or checked with them.

    Call it in a transaction. Nobody can store the bytes between the query and the removal:
    `kept_note` takes the lock, too.
    """
    _lock(tenant_id, digest)
    is_used = Q(digest=digest, removed_at=None)
    may_be_used = Q(kept_digest=digest, status=Status.VALIDATING)
    if except_of is not None:
        may_be_used &= ~Q(pk=except_of.pk)
    if not AdapterVersion.objects.filter(is_used | may_be_used).exists():
        kept = AdapterVersion(tenant_id=tenant_id, digest=digest)
        storage.delete([kept.config_key, kept.tensors_key])


def _lock(tenant_id: uuid.UUID, digest: str) -> None:
    lock_until_commit(f"adapter {tenant_id} {digest}")
