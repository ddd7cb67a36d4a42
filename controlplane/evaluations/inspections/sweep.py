"""The sweep of inspections: end waits that are too long, and queue lost inspections again."""

from __future__ import annotations

import logging

from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.adapters import ingest
from controlplane.adapters.models import AdapterInspection, AdapterVersion
from controlplane.adapters.probing import inspection_send, is_inspector_alive
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

_MAX_PER_TURN = 100
#: Number of messages sent again in one turn: an inspector takes seconds for each.
_MAX_SENT = 20


def held_release() -> None:
    """Release the held versions of all tenants whose wait is over."""
    with all_tenants(reason="find versions of all tenants that waited long enough"):
        rows = AdapterInspection.objects.filter(is_held=True, held_until__lte=timezone.now())
        due = list(rows.select_related("version").order_by("held_until")[:_MAX_PER_TURN])
    for inspection in due:
        with tenant_scope(inspection.tenant_id):
            ingest.version_ingest(inspection.version_id)


def open_send() -> None:
    """Queue inspections whose message was lost, or whose last attempt failed."""
    if not is_inspector_alive():
        return
    with all_tenants(reason="find lost inspections of all tenants"):
        due = list(claimable().select_related("version").order_by("created_at")[:_MAX_SENT])
    for inspection in due:
        inspection_send(inspection.version)


def claimable() -> QuerySet[AdapterInspection]:
    """Return the inspections of the scope that may begin now."""
    is_free = Q(lease_until=None) | Q(lease_until__lte=timezone.now())
    checked = (AdapterVersion.Status.VALIDATING, AdapterVersion.Status.READY)
    return AdapterInspection.objects.filter(
        is_free, status__in=AdapterInspection.OPEN, version__status__in=checked
    )
