"""Delete versions and adapters with their files.

The row goes at once, so that no gateway finds the version a second later. Its bytes go when no
accepted request needs them and no other version has the same: `versions_remove` does that, as a
task soon after the deletion and with every sweep. Then the workers are told to drop it.
"""

from __future__ import annotations

import datetime as dt
import time
import uuid

from django.conf import settings
from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone
from redis.exceptions import RedisError

from contract.messages import protocol
from contract.queue.deleted_adapters import GONE_TTL_S, gone_key
from controlplane.adapters import orphaned_objects, promotion, users
from controlplane.adapters.models import Adapter, AdapterVersion, DeletedVersion, Promotion
from controlplane.errors import Conflict
from controlplane.events.audit.services import record
from controlplane.infra.redis_client import redis_client
from controlplane.tenancy.scoping import all_tenants, tenant_scope

Status = AdapterVersion.Status

#: Time after which no gateway still has the version in its cache.
SETTLED = dt.timedelta(seconds=10)
#: Keys that Redis looks at in one step of the search for accepted requests.
_SCAN = 1000
_ENDED = (b"done", None)


@transaction.atomic
def version_delete(*, version: AdapterVersion) -> None:
    """Delete a version; running requests finish, and new ones do not find it.

    Its number is never used again. If it was live, the version that was live before is so again.
    Raises Conflict while the version is being checked, or if an alias needs it.
    """
    adapter = promotion.lock(version.adapter_id)
    version = AdapterVersion.objects.select_for_update().get(pk=version.pk)
    _check_idle(version)
    live = adapter.live_version
    earlier = promotion.version_before(adapter, gone=[version]) if live == version else live
    users.versions_check(adapter, [version], stays_live=earlier is not None)
    adapter.last_deleted = max(adapter.last_deleted, version.number)
    adapter.save(update_fields=["last_deleted"])
    if live == version:
        promotion.live_version_set(adapter, earlier, Promotion.Cause.DELETED)
    _delete_row(adapter, version)


@transaction.atomic
def adapter_rows_delete(*, adapter: Adapter) -> None:
    """Delete an adapter with its versions; nothing else may refer to it any more.

    Raises Conflict while one of its versions is being checked.
    """
    adapter = Adapter.objects.select_for_update().get(pk=adapter.pk)
    versions = list(adapter.versions.select_for_update().order_by("number"))
    for version in versions:
        _check_idle(version)
    adapter.live_version = None
    adapter.save(update_fields=["live_version"])
    for version in versions:
        _delete_row(adapter, version)
    before = {"name": adapter.name, "versions": len(versions)}
    record("deleted", adapter, before=before)
    adapter.delete()


def _check_idle(version: AdapterVersion) -> None:
    if version.status in (Status.UPLOADED, Status.VALIDATING):
        raise Conflict(
            f"Version {version.number} is being checked. Delete it when it is ready or rejected.",
            code="version_in_use",
        )


def _delete_row(adapter: Adapter, version: AdapterVersion) -> None:
    num_bytes = 0 if version.removed_at else version.num_bytes + version.config_num_bytes
    DeletedVersion.objects.create(
        version_id=version.pk,
        digest=version.digest or version.kept_digest,
        num_bytes=num_bytes,
        removed_at=version.removed_at,
    )
    before = {
        "adapter": adapter.name,
        "number": version.number,
        "status": version.status,
        "digest": version.digest,
        "num_bytes": num_bytes,
    }
    record("deleted", version, before=before)
    version.delete()


def storage_used() -> int:
    """Return the bytes of the tenant's deleted versions that are not removed yet."""
    rows = DeletedVersion.objects.filter(removed_at=None)
    return rows.aggregate(sum=Sum("num_bytes"))["sum"] or 0


def versions_remove() -> int:
    """Remove the bytes of deleted versions that no accepted request needs. -> their number.

    Raises storage.STORAGE_ERRORS, Unavailable without Redis; the next call continues.
    """
    now = timezone.now()
    with all_tenants(reason="find deleted versions of all tenants"):
        rows = DeletedVersion.objects.filter(removed_at=None, created_at__lt=now - SETTLED)
        due = list(rows.order_by("created_at")[: orphaned_objects.MAX_PER_TURN])
        # Uploads to their URLs have ended; `staging_sweep` looked for late ones until now.
        old = DeletedVersion.objects.filter(created_at__lt=now - orphaned_objects.AFTER)
        old.filter(removed_at__isnull=False).delete()
    if not due:
        return 0
    needed = _digests_of_accepted_requests()
    removed = [row for row in due if row.digest not in needed]
    for row in removed:
        with tenant_scope(row.tenant_id):
            _remove(row)
    return len(removed)


def _remove(row: DeletedVersion) -> None:
    orphaned_objects.staging_clear(AdapterVersion(id=row.version_id, tenant_id=row.tenant_id))
    with transaction.atomic():
        if row.digest:
            orphaned_objects.remove_unless_used(row.tenant_id, row.digest)
            workers_forget([row.digest])
        DeletedVersion.objects.filter(pk=row.pk).update(removed_at=timezone.now())


def workers_forget(digests: list[str], *, except_of: uuid.UUID | None = None) -> None:
    """Tell the workers to drop adapters that nobody has any more: from disk, memory and pages.

    except_of  a tenant whose versions do not count, because all are being deleted

    Those that another version of any tenant needs stay; they are the same bytes. Workers that are
    away now ask at their start. Raises Unavailable without Redis.
    """
    with all_tenants(reason="the same bytes may be several tenants'"):
        is_used = Q(digest__in=digests, removed_at=None)
        if except_of is not None:
            is_used &= ~Q(tenant_id=except_of)
        used = set(AdapterVersion.objects.filter(is_used).values_list("digest", flat=True))
    gone = [digest for digest in digests if digest not in used]
    if not gone:
        return
    now = time.time()
    orders = [
        protocol.ControlMessage(action=protocol.Control.FORGET, digest=digest).encode()
        for digest in gone
    ]
    with redis_client() as client:
        key = gone_key(settings.POOL)
        client.zadd(key, dict.fromkeys(gone, now))
        client.zremrangebyscore(key, "-inf", now - GONE_TTL_S)
        for worker in client.zrange(protocol.workers_key(settings.POOL), 0, -1):
            for order in orders:
                control = protocol.control_key(settings.POOL, worker.decode())
                fields = {protocol.PAYLOAD_FIELD: order}
                client.xadd(control, fields, maxlen=protocol.CONTROL_STREAM_MAX_LEN)


def _digests_of_accepted_requests() -> set[str]:
    """Return the adapters of requests that wait or run. Raises Unavailable without Redis."""
    found: set[str] = set()
    with redis_client() as client:
        for key in client.scan_iter(match=protocol.job_key(settings.POOL, "*"), count=_SCAN):
            try:
                state, item = client.hmget(key, "state", "item")
            except RedisError:  # a key of another type has this name
                continue
            if state not in _ENDED and item:
                found.update(item.decode().split(" ")[2].split(","))
    return found
