"""Choose the next work: the oldest of the tenant that was served longest ago.

The broker delivers messages in the order they were sent, so one tenant with many would delay all
others. A message therefore only says that there is work, and the work is chosen here, from the
database. A tenant waits for at most one piece of work of each other tenant, however much they have
waiting.
"""

from __future__ import annotations

from typing import TypeVar

from django.db.models import F, OuterRef, QuerySet, Subquery
from django.utils import timezone

from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import Tenant
from controlplane.usage.limits.models import Turn

_Row = TypeVar("_Row", bound=TenantModel)


def next_of(kind: Turn.Kind, waiting: QuerySet[_Row]) -> _Row | None:
    """Return the row to start next; call it across tenants. A suspended tenant's rows wait."""
    served = Turn.objects.filter(tenant_id=OuterRef("tenant_id"), kind=kind).values("served_at")
    rows = waiting.filter(tenant__status=Tenant.Status.ACTIVE)
    in_turn = rows.annotate(served_at=Subquery(served[:1]))
    return in_turn.order_by(F("served_at").asc(nulls_first=True), "created_at", "id").first()


def taken(kind: Turn.Kind) -> None:
    """Note that work of the tenant in scope was started."""
    Turn.objects.update_or_create(kind=kind, defaults={"served_at": timezone.now()})
