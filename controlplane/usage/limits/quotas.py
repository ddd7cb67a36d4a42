"""Quotas of a tenant's storage and waiting work.

Code that uses a quota calls `check` in the same transaction. The check holds a lock of the tenant
until that transaction ends, so concurrent requests together cannot exceed the quota.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import OuterRef, Subquery, Value
from django.db.models.functions import Coalesce

from controlplane.errors import ApiError, InvalidRequest, RateLimited
from controlplane.events.audit.services import record
from controlplane.infra.hooks import Hook
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.usage.limits.models import TenantQuota

#: By quota: counts what the tenant in scope uses of it.
USES: dict[str, Hook[[], int]] = {
    "storage_bytes": Hook(),
    "training_runs": Hook(),
    "training_device_seconds": Hook(),
    "adapter_checks": Hook(),
}


def allowed(name: str) -> int:
    """Return the quota of the tenant in scope."""
    own = TenantQuota.objects.values_list(name, flat=True).first()
    return int(settings.TENANT_QUOTAS[name] if own is None else own)


def used(name: str) -> int:
    """Return how much the tenant in scope uses of a quota in `USES`."""
    return sum(USES[name]())


def allowed_to_each(name: str, *, tenant: str = "tenant_id") -> Coalesce:
    """Return an expression for a query over all tenants: the quota of each row's tenant.

    tenant  the field that has the tenant's id
    """
    own = TenantQuota.objects.filter(tenant_id=OuterRef(tenant)).values(name)[:1]
    return Coalesce(Subquery(own), Value(settings.TENANT_QUOTAS[name]))


def check(name: str, more: int = 1, *, retry_after_s: Callable[[], float] | None = None) -> None:
    """Check that the quota allows `more`; call it in the transaction that uses it.

    retry_after_s  estimates when it allows more again
    Raises InvalidRequest for storage, RateLimited for work.
    """
    lock(name)
    if used(name) + more > allowed(name):
        raise refusal(name, retry_after_s() if retry_after_s else None)


def lock(name: str) -> None:
    """Hold the tenant's lock of a quota until the transaction ends.

    Take it before `record`, whose lock all code takes last.
    """
    lock_until_commit(f"quota {name} {current_tenant_id()}")


def refusal(name: str, retry_after_s: float | None = None) -> ApiError:
    """Return the error for a request that would exceed the quota."""
    most = allowed(name)
    if name == "storage_bytes":
        return InvalidRequest(
            f"Your organization's files, adapters, datasets and saved states of training may use "
            f"{most} bytes in total. Delete some of them.",
            code="storage_limit_exceeded",
        )
    message, code = _MESSAGES[name]
    return RateLimited(message.format(most=most), code=code, retry_after_s=retry_after_s or 60)


_MESSAGES = {
    "training_runs": (
        "Your organization may have {most} training runs that wait or run. Cancel one, or wait "
        "until one has ended.",
        "too_many_training_runs",
    ),
    "adapter_checks": (
        "{most} adapter versions of your organization wait for their check. Try again when some "
        "are ready.",
        "too_many_adapter_checks",
    ),
}


@transaction.atomic
def quota_set(**values: int | None) -> TenantQuota:
    """Set quotas of the tenant in scope: those not named stay, for None the settings' apply."""
    row = TenantQuota.objects.select_for_update().first()
    before = _audit_fields(row) if row else None
    row = row or TenantQuota()
    for name, value in values.items():
        if name not in TenantQuota.NAMES:
            raise TypeError(f"there is no quota {name}")
        setattr(row, name, value)
    row.save()
    record("changed" if before else "created", row, before=before, after=_audit_fields(row))
    return row


def _audit_fields(row: TenantQuota) -> dict[str, Any]:
    return {name: getattr(row, name) for name in TenantQuota.NAMES}


def quota_state() -> dict[str, Any]:
    """Return each quota of the tenant in scope and its use, for display."""
    state: dict[str, Any] = {name: {"limit": allowed(name)} for name in TenantQuota.NAMES}
    for name in USES:
        state[name]["used"] = used(name)
    return state
