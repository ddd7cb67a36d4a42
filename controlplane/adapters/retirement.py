"""The end of a version's life: deprecate it, set its last day, retire it, take it back.

All act for the tenant in scope. Gateways see each change within half a second.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from django.db import transaction
from django.utils import timezone

from controlplane.adapters import orphaned_objects, promotion, users
from controlplane.adapters.models import Adapter, AdapterVersion, Promotion, today
from controlplane.errors import Conflict
from controlplane.events.audit.services import record
from controlplane.tenancy.scoping import all_tenants, tenant_scope

Status = AdapterVersion.Status


@transaction.atomic
def version_deprecate(
    *, version: AdapterVersion, shutdown_date: dt.date | None = None
) -> AdapterVersion:
    """Mark a ready version as deprecated, which its answers say; set or clear its last day.

    shutdown_date  from this day (UTC) requests for it are refused; a date that has come takes
                   effect at once. None: it has no end
    Raises Conflict for a version that is not ready; with a date that has come, also for what an
    alias needs.
    """
    version = _locked(version)
    _check_ready(version)
    before = _state(version)
    if shutdown_date is not None and shutdown_date <= today():
        versions_check_unused(version.adapter, [version])
    version.deprecated_at = version.deprecated_at or timezone.now()
    version.shutdown_date = shutdown_date
    return _saved(version, "deprecated", before)


@transaction.atomic
def version_undeprecate(*, version: AdapterVersion) -> AdapterVersion:
    """Take back a deprecation with its date. Raises Conflict for a version that is not ready."""
    version = _locked(version)
    _check_ready(version)
    before = _state(version)
    version.deprecated_at = version.shutdown_date = None
    return _saved(version, "undeprecated", before)


@transaction.atomic
def version_retire(*, version: AdapterVersion) -> AdapterVersion:
    """Refuse new requests for a ready version; running ones finish. A retired one stays so.

    If it was live, the version that was live before it is so again. Raises Conflict for a version
    that is neither, and for what an alias needs.
    """
    version = _locked(version)
    if version.status != Status.RETIRED:
        _check_ready(version)
        versions_check_unused(version.adapter, [version])
        versions_retire(version.adapter, [version])
        version.refresh_from_db()
    return version


@transaction.atomic
def version_unretire(*, version: AdapterVersion) -> AdapterVersion:
    """Make a retired version ready again while its files are kept. It does not become live.

    A last day that has come is cleared. Raises Conflict for a version that is not retired, or whose
    files are removed.
    """
    version = _locked(version)
    if version.status != Status.RETIRED:
        raise Conflict(
            f"Version {version.number} is {version.status}: only a retired version can be "
            "taken back.",
            code="version_not_retired",
        )
    if version.removed_at is not None:
        raise Conflict(
            f"The files of version {version.number} were removed "
            f"{orphaned_objects.RETIRED_KEPT.days} days after it was retired: upload them again.",
            code="files_removed",
        )
    before = _state(version)
    if version.is_shut_down:
        version.shutdown_date = None
    version.status, version.status_changed_at = Status.READY, timezone.now()
    version.is_cleared = False
    return _saved(version, "unretired", before)


def versions_check_unused(adapter: Adapter, versions: Sequence[AdapterVersion]) -> None:
    """Raise Conflict if an alias needs versions of a locked adapter, or a live one."""
    live = adapter.live_version
    earlier = promotion.version_before(adapter, gone=versions) if live in versions else live
    users.versions_check(adapter, versions, stays_live=earlier is not None)


def versions_retire(adapter: Adapter, versions: Sequence[AdapterVersion]) -> None:
    """Retire ready versions of a locked adapter. Call it last in a transaction."""
    live = adapter.live_version
    for version in versions:
        if version.move(Status.READY, Status.RETIRED):
            record("retired", version, after={"adapter": adapter.name, "number": version.number})
    if live in versions:
        earlier = promotion.version_before(adapter)
        promotion.live_version_set(adapter, earlier, Promotion.Cause.RETIRED)


def versions_shut_down() -> int:
    """Retire the versions of all tenants whose last day has come. -> their number."""
    with all_tenants(reason="find versions whose last day has come"):
        rows = AdapterVersion.objects.filter(status=Status.READY, shutdown_date__lte=today())
        found = list(rows.order_by("shutdown_date")[: orphaned_objects.MAX_PER_TURN])
    for version in found:
        with tenant_scope(version.tenant_id), transaction.atomic():
            adapter = promotion.lock(version.adapter_id)
            row = AdapterVersion.objects.select_for_update().get(pk=version.pk)
            if row.is_shut_down:  # else somebody has changed the date
                versions_retire(adapter, [row])
    return len(found)


def files_until(version: AdapterVersion) -> dt.datetime | None:
    """Return until when a retired version can be taken back; None if it cannot, or is not one."""
    if version.status != Status.RETIRED or version.removed_at is not None:
        return None
    return version.status_changed_at + orphaned_objects.RETIRED_KEPT


def _locked(version: AdapterVersion) -> AdapterVersion:
    """Return the version with its adapter, locked in everybody's order: the adapter first."""
    adapter = promotion.lock(version.adapter_id)
    found = AdapterVersion.objects.select_for_update().get(pk=version.pk)
    found.adapter = adapter
    return found


def _check_ready(version: AdapterVersion) -> None:
    if version.status != Status.READY:
        raise Conflict(
            f"Version {version.number} is {version.status}, not ready.", code="version_not_ready"
        )


def _state(version: AdapterVersion) -> dict[str, object]:
    return {
        "is_deprecated": version.deprecated_at is not None,
        "shutdown_date": version.shutdown_date,
    }


def _saved(version: AdapterVersion, action: str, before: dict[str, object]) -> AdapterVersion:
    fields = ["deprecated_at", "shutdown_date", "status", "status_changed_at", "is_cleared"]
    version.save(update_fields=fields)
    named = {"adapter": version.adapter.name, "number": version.number}
    record(action, version, before=before, after=named | _state(version))
    return version
