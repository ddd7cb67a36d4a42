"""The sweep of inspections: end waits that are too long, and queue lost inspections again."""

from __future__ import annotations

import contextlib
import logging

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone

from contract.messages.protocol import Heartbeat
from controlplane.adapters import ingest
from controlplane.adapters.models import AdapterInspection, AdapterVersion
from controlplane.adapters.probing import inspection_send, is_inspector_alive
from controlplane.errors import Unavailable
from controlplane.queue.workers import has_copies, precisions, workers
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


def copies_measure() -> None:
    """Have ready versions inspected again whose copy in FP8 no probe has compared yet.

    So they are when their workers begin to keep adapters in FP8.
    """
    if settings.PROBE == "off" or not is_inspector_alive():
        return
    beats: dict[str, list[Heartbeat]] = {}
    with contextlib.suppress(Unavailable):
        for worker in workers():
            if worker.is_ready:
                beats.setdefault(worker.heartbeat.base_model, []).append(worker.heartbeat)
    bases = [name for name, told in beats.items() if has_copies(precisions(told))]
    if not bases:
        return
    with all_tenants(reason="find versions whose copies in FP8 were not compared"):
        rows = AdapterInspection.objects.filter(
            status=AdapterInspection.Status.AGREED,
            version__status=AdapterVersion.Status.READY,
            version__copy_nats=None,
            version__adapter__base_model__name__in=bases,
        )
        due = list(rows.select_related("version").order_by("created_at")[:_MAX_SENT])
    for inspection in due:
        with tenant_scope(inspection.tenant_id):
            row = AdapterInspection.objects.filter(pk=inspection.pk, status=inspection.status)
            if row.update(status=AdapterInspection.Status.WAITING, why="", lease_until=None):
                inspection_send(inspection.version)


def claimable() -> QuerySet[AdapterInspection]:
    """Return the inspections of the scope that may begin now."""
    is_free = Q(lease_until=None) | Q(lease_until__lte=timezone.now())
    checked = (AdapterVersion.Status.VALIDATING, AdapterVersion.Status.READY)
    return AdapterInspection.objects.filter(
        is_free, status__in=AdapterInspection.OPEN, version__status__in=checked
    )
