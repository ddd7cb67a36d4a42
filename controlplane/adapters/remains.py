"""What versions leave in the object store that nobody will read, and its end.

Two kinds. A client's URL works for a while after its version was decided on, so what was staged is
removed a second time. And checked bytes are in the store before their version is ready, which it
may never be. Every such object is found by its version's row, which is there before it: the
store is never searched, so a store that another installation uses too is safe.
"""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane import storage
from controlplane.adapters.models import AdapterVersion
from controlplane.locks import lock_until_commit
from controlplane.scoping import all_tenants, tenant_scope

Status = AdapterVersion.Status

#: After a version has ended. No URL of it works any more then, and what was begun with one is over.
AFTER = dt.timedelta(days=1)
#: Versions in one turn; the next one goes on.
MAX_PER_TURN = 500


def versions_clear() -> int:
    """One turn over all tenants' versions; how many it was done with.

    Raises storage.STORAGE_ERRORS; a later turn begins with those that are left.
    """
    ended = (Status.READY, Status.REJECTED, Status.RETIRED)
    with all_tenants(reason="what versions left is looked for everywhere"):
        rows = AdapterVersion.objects.filter(
            is_cleared=False, status__in=ended, status_changed_at__lt=timezone.now() - AFTER
        )
        found = list(rows.order_by("status_changed_at")[:MAX_PER_TURN])
    for version in found:
        with tenant_scope(version.tenant_id):
            staging_clear(version)
            if version.kept_digest:
                kept_forget(version, version.kept_digest)
            AdapterVersion.objects.filter(pk=version.pk).update(is_cleared=True)
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
    is_used = Q(digest=digest)
    may_be_used = Q(kept_digest=digest, status=Status.VALIDATING) & ~Q(pk=version.pk)
    with transaction.atomic():
        # Nobody puts them there between the look and the removal: who would, waits to say so.
        _lock(version, digest)
        if not AdapterVersion.objects.filter(is_used | may_be_used).exists():
            kept = AdapterVersion(tenant_id=version.tenant_id, digest=digest)
            storage.delete([kept.config_key, kept.tensors_key])
        row = AdapterVersion.objects.filter(pk=version.pk, kept_digest=digest)
        row.update(kept_digest="")


def _lock(version: AdapterVersion, digest: str) -> None:
    lock_until_commit(f"adapter {version.tenant_id} {digest}")
