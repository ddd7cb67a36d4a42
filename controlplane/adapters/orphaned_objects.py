"""What versions leave in the object store that nobody will read, and its end.

Three kinds. A client's URL works for a while after its version was decided on, and a PUT that was
begun in time may take long: what appears in a tenant's staging area without a version that waits
for it is removed within one turn. Checked bytes are in the store before their version is ready,
which it may never be. And versions that were retired have files that nothing reads in the end.
The staging areas are listed; all else is found by the versions' rows, which are there before it. No
object is touched whose version this installation does not know.
"""

from __future__ import annotations

import datetime as dt
import uuid

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.adapters.models import AdapterVersion
from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import all_tenants, tenant_scope

Status = AdapterVersion.Status

_ENDED = (Status.READY, Status.REJECTED, Status.RETIRED)

#: After a version has ended. No URL of it works any more then, and what was begun with one is over.
AFTER = dt.timedelta(days=1)
#: Versions in one turn; the next one goes on.
MAX_PER_TURN = 500
#: A rejected version counts in its tenant's storage for so long: its URLs live half of it.
REJECTED_COUNTS = dt.timedelta(minutes=30)
#: Staging areas are looked through for so long after their tenant's last version moved.
_WATCHED = dt.timedelta(days=30)
#: What was accepted before a version was retired, a batch's last line too, has ended by then.
RETIRED_KEPT = dt.timedelta(days=2)


def versions_clear() -> int:
    """One turn over all tenants' versions; how many it was done with.

    Raises storage.STORAGE_ERRORS; a later turn begins with those that are left.
    """
    with all_tenants(reason="what versions left is looked for everywhere"):
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
    """Remove what was put into staging areas after its version was decided; how many objects.

    Raises storage.STORAGE_ERRORS.
    """
    with all_tenants(reason="late uploads of every tenant are looked for"):
        rows = AdapterVersion.objects.filter(status_changed_at__gt=timezone.now() - _WATCHED)
        tenants = list(rows.order_by("tenant_id").values_list("tenant_id", flat=True).distinct())
    num_removed = 0
    for tenant_id in tenants:
        prefix = f"t/{tenant_id}/u/"
        late = [key for key in storage.keys(prefix) if _is_late(tenant_id, key[len(prefix) :])]
        storage.delete(late)
        num_removed += len(late)
    return num_removed


def _is_late(tenant_id: uuid.UUID, name: str) -> bool:
    """Whether a staged file, by its name in the area, is of a version that is decided."""
    try:
        version_id = uuid.UUID(name.partition("/")[0])
    except ValueError:
        return False
    with tenant_scope(tenant_id):
        return AdapterVersion.objects.filter(pk=version_id, status__in=_ENDED).exists()


def retired_remove() -> int:
    """Remove the files of versions that were retired long enough ago; how many versions.

    Raises storage.STORAGE_ERRORS; a later turn begins with those that are left.
    """
    with all_tenants(reason="retired versions of every tenant are looked for"):
        rows = AdapterVersion.objects.filter(
            status=Status.RETIRED,
            removed_at=None,
            status_changed_at__lt=timezone.now() - RETIRED_KEPT,
        )
        found = list(rows.order_by("status_changed_at")[:MAX_PER_TURN])
    for version in found:
        with tenant_scope(version.tenant_id), transaction.atomic():
            _lock(version, version.digest)
            AdapterVersion.objects.filter(pk=version.pk).update(removed_at=timezone.now())
            _remove_unless_used(version, version.digest)
    return len(found)


def staging_clear(version: AdapterVersion) -> None:
    storage.delete([version.staged_config_key, version.staged_tensors_key])


def kept_note(version: AdapterVersion) -> bool:
    """Say, before checked bytes are put under `version.digest`, that they will be there.

    False when the version is not being checked any more: then they must not be.
    """
    row = AdapterVersion.objects.filter(pk=version.pk, status=Status.VALIDATING)
    earlier = row.values_list("kept_digest", flat=True).first() or version.digest
    if earlier != version.digest:  # the client has put other files since
        kept_forget(version, earlier)
    with transaction.atomic():
        _lock(version, version.digest)
        return row.update(kept_digest=version.digest) == 1


def is_kept(version: AdapterVersion) -> bool:
    """Whether nobody has forgotten meanwhile what was put under `version.digest` for it.

    To be asked in the transaction that makes the version ready.
    """
    rows = AdapterVersion.objects.select_for_update().filter(pk=version.pk)
    return rows.filter(kept_digest=version.digest).exists()


def kept_forget(version: AdapterVersion, digest: str) -> None:
    """Remove what was put under a digest for a version, unless one that is ready, or may become
    so, has it too."""
    with transaction.atomic():
        # Nobody puts them there between the look and the removal: who would, waits to say so.
        _lock(version, digest)
        _remove_unless_used(version, digest)
        row = AdapterVersion.objects.filter(pk=version.pk, kept_digest=digest)
        row.update(kept_digest="")


def _remove_unless_used(version: AdapterVersion, digest: str) -> None:
    is_used = Q(digest=digest, removed_at=None)
    may_be_used = Q(kept_digest=digest, status=Status.VALIDATING) & ~Q(pk=version.pk)
    if not AdapterVersion.objects.filter(is_used | may_be_used).exists():
        kept = AdapterVersion(tenant_id=version.tenant_id, digest=digest)
        storage.delete([kept.config_key, kept.tensors_key])


def _lock(version: AdapterVersion, digest: str) -> None:
    lock_until_commit(f"adapter {version.tenant_id} {digest}")
