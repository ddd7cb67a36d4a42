"""Whose work is taken up next: the tenant's that was served longest ago, and of it the oldest.

The messages of the broker come in the order in which they were sent: somebody who sends many would
have everybody else wait behind them. So a message only says that there is something to do. What is
done is chosen here, out of the database. A tenant waits for at most one piece of work of each other
tenant, however much those have waiting.
"""

from __future__ import annotations

from typing import TypeVar

from django.db.models import F, OuterRef, QuerySet, Subquery
from django.utils import timezone

from controlplane.limits.models import Turn
from controlplane.tenancy.scoping import TenantModel
from controlplane.tenants.models import Tenant

_Row = TypeVar("_Row", bound=TenantModel)


def next_of(kind: Turn.Kind, waiting: QuerySet[_Row]) -> _Row | None:
    """The row to take up; to be called across tenants. A suspended tenant's wait."""
    served = Turn.objects.filter(tenant_id=OuterRef("tenant_id"), kind=kind).values("served_at")
    rows = waiting.filter(tenant__status=Tenant.Status.ACTIVE)
    in_turn = rows.annotate(served_at=Subquery(served[:1]))
    return in_turn.order_by(F("served_at").asc(nulls_first=True), "created_at", "id").first()


def taken(kind: Turn.Kind) -> None:
    """Note that work of the tenant in scope is taken up."""
    Turn.objects.update_or_create(kind=kind, defaults={"served_at": timezone.now()})
