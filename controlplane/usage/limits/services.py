"""Read and change limits. Redis gets a change with the next request."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet, Sum
from django.utils import timezone

from controlplane.errors import Conflict, PermissionDenied, from_validation, require
from controlplane.events.audit.services import record
from controlplane.tenancy.model_scope import check_named
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import Principal
from controlplane.tenants.key_grants import check_limits_of
from controlplane.tenants.models import ApiKey
from controlplane.usage.limits.admit import BudgetPeriod, Limits, Policy
from controlplane.usage.limits.models import Budget, RateLimit
from controlplane.usage.models import UsageDay

_Row = TypeVar("_Row", RateLimit, Budget)


def limits_for(api_key: ApiKey | None, names: Iterable[str]) -> Limits:
    """Return the limits of this key, in the tenant in scope, for a model with these names.

    A key's limits apply to it and its descendants together: making another key does not evade them.
    """
    is_own = Q(api_key=None) | Q(api_key__in=api_key.line if api_key else [])
    rates = RateLimit.objects.filter(is_own, model__in=["", *names]).order_by("id")
    budgets = Budget.objects.filter(is_own).order_by("id")
    now = timezone.now()
    return Limits(
        policies=tuple(_policy(row) for row in rates),
        budgets=tuple(budget_period(row, now) for row in budgets),
    )


def _policy(row: RateLimit) -> Policy:
    return Policy(
        id=row.id.hex,
        scope=row.scope,
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        max_concurrent=row.max_concurrent,
        max_waiting=row.max_waiting,
    )


def budget_period(row: Budget, now: dt.datetime) -> BudgetPeriod:
    """Return the budget's period that contains `now`."""
    start = now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if row.period == Budget.Period.MONTH:
        start = start.replace(day=1)
        end = (start + dt.timedelta(days=32)).replace(day=1)
    else:
        end = start + dt.timedelta(days=1)
    return BudgetPeriod(
        id=row.id.hex,
        api_key_id=str(row.api_key_id) if row.api_key_id else None,
        period=row.period,
        starts_at=start.timestamp(),
        ends_at=end.timestamp(),
        hard_limit=row.hard_limit,
        soft_limit=row.soft_limit,
    )


def limited_keys(key_ids: Iterable[uuid.UUID]) -> set[uuid.UUID]:
    """Return those of the keys that have their own limits or budgets."""
    return {
        key_id
        for model in (RateLimit, Budget)
        for key_id in model._default_manager.filter(api_key__in=key_ids).values_list(
            "api_key_id", flat=True
        )
    }


def tokens_spent(tenant_id: str, budget: BudgetPeriod) -> int:
    """Return the tokens of the budget's period, from the daily usage totals."""
    start = dt.datetime.fromtimestamp(budget.starts_at, tz=dt.UTC)
    end = dt.datetime.fromtimestamp(budget.ends_at, tz=dt.UTC)
    with tenant_scope(uuid.UUID(tenant_id)):
        rows = UsageDay.objects.filter(starts_at__gte=start, starts_at__lt=end)
        if budget.api_key_id is not None:
            key_id = uuid.UUID(budget.api_key_id)
            made = ApiKey.made_by(key_id).values_list("pk", flat=True)
            rows = rows.filter(api_key_id__in=[key_id, *made])
        sums = rows.aggregate(read=Sum("prompt_tokens"), written=Sum("completion_tokens"))
    return (sums["read"] or 0) + (sums["written"] or 0)


def rate_limits() -> QuerySet[RateLimit]:
    """Return the limits for all models, and those for models that the caller may name."""
    rows = RateLimit.objects.filter(model="") | RateLimit.objects.allowed()
    return rows.select_related("api_key")


def rate_limit_get(*, limit_id: uuid.UUID) -> RateLimit:
    """Return limits that the caller may see. Raises NotFound."""
    return require(rate_limits().filter(pk=limit_id).first(), "There is no such limit.")


def budget_get(*, budget_id: uuid.UUID) -> Budget:
    """Return the budget. Raises NotFound."""
    found = Budget.objects.select_related("api_key").filter(pk=budget_id).first()
    return require(found, "There is no such budget.")


@transaction.atomic
def rate_limit_set(
    *,
    api_key_id: uuid.UUID | None = None,
    model: str = "",
    by: Principal | None = None,
    **limits: int | None,
) -> RateLimit:
    """Set limits of the tenant in scope, of one of its keys, or of a model.

    by      who sets them; None: the operator, who alone may set those of the whole tenant
    limits  by the names of `RateLimit.RATES`; those not named stay, None does not limit
    Raises InvalidRequest for an invalid value, PermissionDenied, Conflict.
    """
    if model:
        check_named(model, "model")
    rows = RateLimit.objects.select_for_update()
    row = rows.filter(api_key_id=api_key_id, model=model).first()
    before = _audit_fields(row) if row else None
    row = row or RateLimit(api_key_id=api_key_id, model=model)
    for name, value in limits.items():
        if name not in RateLimit.RATES:
            raise TypeError(f"there is no limit {name}")
        setattr(row, name, value)
    return _checked_save(row, before, by)


@transaction.atomic
def budget_set(
    *,
    api_key_id: uuid.UUID | None = None,
    period: str = Budget.Period.MONTH,
    by: Principal | None = None,
    **limits: int | None,
) -> Budget:
    """Set a token budget of the tenant in scope, or of one of its keys.

    by      who sets it; None: the operator
    limits  `hard_limit` and `soft_limit`; the one not named stays, None does not limit
    Raises InvalidRequest when neither limits then, or the soft one is above the hard one,
    PermissionDenied, Conflict.
    """
    rows = Budget.objects.select_for_update()
    row = rows.filter(api_key_id=api_key_id, period=period).first()
    before = _audit_fields(row) if row else None
    row = row or Budget(api_key_id=api_key_id, period=period)
    for name, value in limits.items():
        if name not in ("hard_limit", "soft_limit"):
            raise TypeError(f"there is no limit {name}")
        # A new limit gets an event again; the same one, set again, does not.
        if getattr(row, name) != value:
            setattr(row, name, value)
            setattr(row, name.replace("limit", "told_for"), None)
    return _checked_save(row, before, by)


@transaction.atomic
def limit_remove(row: RateLimit | Budget, *, by: Principal | None = None) -> None:
    """Remove limits or a budget; `by` is as for `rate_limit_set`. Raises PermissionDenied."""
    _check_may_change(row, by)
    record("deleted", row, before=_audit_fields(row))
    row.delete()


def _check_may_change(row: RateLimit | Budget, by: Principal | None) -> None:
    if by is None:
        return
    if isinstance(row, RateLimit) and row.scope == "tenant":
        raise PermissionDenied(
            "Only the operator can set the limits of the whole tenant. Choose a key or a model."
        )
    check_limits_of(by, row.api_key)


def _audit_fields(row: RateLimit | Budget) -> dict[str, Any]:
    """Return the fields of a limit that the audit trail records."""
    hidden = {"id", "tenant", "created_at", "updated_at", "soft_told_for", "hard_told_for"}
    fields = [field for field in row._meta.concrete_fields if field.name not in hidden]
    return {field.name: getattr(row, field.attname) for field in fields}


def _checked_save(row: _Row, before: dict[str, Any] | None, by: Principal | None) -> _Row:
    try:
        _check_may_change(row, by)
        row.full_clean(exclude=["tenant"], validate_unique=False)
    except PermissionDenied as error:
        error.param = "api_key" if row.api_key_id else None
        raise
    except ValidationError as error:
        raise from_validation(error) from error
    try:
        with transaction.atomic():
            row.save()
    except IntegrityError as error:
        raise Conflict("Another request is setting the same limit. Try again.") from error
    record("changed" if before else "created", row, before=before, after=_audit_fields(row))
    return row
