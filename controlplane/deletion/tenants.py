"""Schedule a tenant's deletion, and undo that. `execution` and `steps` do the deletion."""

from __future__ import annotations

import datetime as dt
import uuid

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from controlplane.deletion.models import TenantDeletion
from controlplane.errors import Conflict, InvalidRequest, NotFound
from controlplane.events.audit.origin import current_origin
from controlplane.events.audit.services import record, record_named
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import Tenant

Status = TenantDeletion.Status


@transaction.atomic
def tenant_delete(*, tenant: Tenant, confirm: str, grace_days: int | None = None) -> TenantDeletion:
    """Suspend a tenant, and schedule its deletion after a grace period.

    confirm     the tenant's slug, typed again
    grace_days  None: the setting's; 0: none, so that nobody can undo it
    Raises InvalidRequest for another slug, Conflict when it is being deleted already.
    """
    if confirm != tenant.slug:
        raise InvalidRequest(
            "confirm must be the slug of the tenant that you want to delete.", param="confirm"
        )
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    if tenant.status in (Tenant.Status.DELETING, Tenant.Status.DELETED):
        raise Conflict(f"{tenant.slug} is being deleted already.")
    days = settings.TENANT_DELETION_GRACE_DAYS if grace_days is None else grace_days
    origin = current_origin()
    deletion = TenantDeletion.objects.create(
        tenant_id=tenant.pk,
        slug=tenant.slug,
        status_before=tenant.status,
        requested_by=(origin.actor_name or origin.actor_id)[:320],
        due_at=timezone.now() + dt.timedelta(days=days),
    )
    _set_status(tenant, Tenant.Status.DELETING)
    _record("scheduled", deletion)
    return deletion


@transaction.atomic
def tenant_restore(*, tenant: Tenant) -> Tenant:
    """Undo a deletion within its grace period. Raises Conflict for none, or when that is over."""
    tenant = Tenant.objects.select_for_update().get(pk=tenant.pk)
    deletion = (
        TenantDeletion.objects.select_for_update()
        .filter(tenant_id=tenant.pk, status__in=TenantDeletion.OPEN)
        .first()
    )
    if deletion is None:
        raise Conflict(f"{tenant.slug} is not being deleted.")
    if not deletion.can_be_undone:
        raise Conflict(
            f"The grace period of {tenant.slug} is over: its data is being deleted, which cannot "
            "be undone.",
            code="grace_period_over",
        )
    deletion.status = Status.RESTORED
    deletion.restored_at = timezone.now()
    deletion.save(update_fields=["status", "restored_at"])
    _set_status(tenant, Tenant.Status(deletion.status_before))
    _record("restored", deletion)
    return tenant


def tenant_id_of(name: str) -> uuid.UUID:
    """Return the id of a tenant by its slug, or the slug that it had. Raises NotFound."""
    tenant = Tenant.objects.filter(slug=name).first()
    if tenant is not None:
        return tenant.pk
    deletion = TenantDeletion.objects.filter(slug=name).order_by("-requested_at").first()
    if deletion is not None:
        return deletion.tenant_id
    raise NotFound(f"There is no tenant {name}, nor a deleted one.")


def _set_status(tenant: Tenant, status: Tenant.Status) -> None:
    before = tenant.status
    tenant.status = status
    tenant.save(update_fields=["status"])
    record("status_set", tenant, before={"status": before}, after={"status": status})


def _record(action: str, deletion: TenantDeletion) -> None:
    """Add an event to the platform's own trail, too."""
    after = {"slug": deletion.slug, "due_at": deletion.due_at}
    with all_tenants(reason="the platform's own trail"):
        record_named(action, "tenant_deletion", str(deletion.pk), after=after)
