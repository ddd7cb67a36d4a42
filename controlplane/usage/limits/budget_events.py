"""Publish an event when a budget's limit is reached: once for each limit and period."""

from __future__ import annotations

import datetime as dt
import logging
import uuid

from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone

from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits.admit import BudgetPeriod
from controlplane.usage.limits.models import Budget
from controlplane.usage.limits.services import budget_period, tokens_spent
from controlplane.usage.models import UsageDay

log = logging.getLogger(__name__)

#: A budget's limits, and the fields with the period for which each event was published.
LIMITS = {"soft_limit": "soft_told_for", "hard_limit": "hard_told_for"}
#: Share of the hard limit that counts as reached: requests reserve tokens, so the last ones
#: are hardly ever spent.
HARD_PART = 0.95


def budgets_check() -> int:
    """Publish the limits of all tenants that have been reached. -> their number."""
    now = timezone.now()
    told = 0
    for tenant_id, budget in _near(now):
        period = budget_period(budget, now)
        spent = tokens_spent(str(tenant_id), period)
        with tenant_scope(tenant_id):
            told += sum(_tell(budget, period, name, spent) for name in LIMITS)
    return told


def _near(now: dt.datetime) -> list[tuple[uuid.UUID, Budget]]:
    """Return the budgets whose tenant, with all its keys, may have reached a limit."""
    with all_tenants(reason="the budgets of all tenants are checked"):
        budgets = list(Budget.objects.select_related("api_key"))
        spent = {
            period: dict(
                UsageDay.objects.filter(
                    starts_at__gte=_start(period, now), tenant__in={b.tenant_id for b in budgets}
                )
                .values_list("tenant_id")
                .annotate(tokens=Sum("prompt_tokens") + Sum("completion_tokens"))
            )
            for period in Budget.Period.values
        }
    return [
        (budget.tenant_id, budget)
        for budget in budgets
        if any(
            spent[budget.period].get(budget.tenant_id, 0) >= _reached_at(budget, name)
            and getattr(budget, told) != _start(budget.period, now)
            for name, told in LIMITS.items()
        )
    ]


def _start(period: str, now: dt.datetime) -> dt.datetime:
    start = now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return start.replace(day=1) if period == Budget.Period.MONTH else start


def _reached_at(budget: Budget, name: str) -> float:
    """Return the tokens at which a limit counts as reached; without one, infinity."""
    limit = getattr(budget, name)
    if limit is None:
        return float("inf")
    return float(limit * HARD_PART if name == "hard_limit" else limit)


@transaction.atomic
def _tell(budget: Budget, period: BudgetPeriod, name: str, spent: int) -> bool:
    """Publish an event if the limit is reached and has no event for this period."""
    starts_at = dt.datetime.fromtimestamp(period.starts_at, tz=dt.UTC)
    told = LIMITS[name]
    if spent < _reached_at(budget, name):
        return False
    # Unless somebody has just changed the limit, or another process has published.
    same = Budget.objects.filter(pk=budget.pk, **{name: getattr(budget, name)})
    if not same.filter(~Q(**{told: starts_at}) | Q(**{told: None})).update(**{told: starts_at}):
        return False
    publish(
        EventType.BUDGET_REACHED,
        budget=str(budget.pk),
        limit=name.removesuffix("_limit"),
        tokens=getattr(budget, name),
        spent=spent,
        period=budget.period,
        starts_at=starts_at.isoformat(),
        api_key=budget.api_key.public_id if budget.api_key else None,
    )
    log.info("budget reached", extra={"budget_id": str(budget.pk), "limit": name})
    return True
