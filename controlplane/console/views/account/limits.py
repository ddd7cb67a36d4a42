"""Limits and budgets of the tenant: their use, and their changes."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.console import limit_meters
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import BudgetForm, ErrorsShown, LimitForm
from controlplane.tenants.auth import Permission
from controlplane.usage.limits import services
from controlplane.usage.limits.models import Budget, RateLimit


@require_safe
@member_page
def limits(request: ConsoleRequest) -> HttpResponse:
    return render(request, "console/limits.html", _context())


@require_safe
@member_page
def limits_now(request: ConsoleRequest) -> HttpResponse:
    """Render only the bars: the page reloads them every few seconds."""
    return render(request, "console/_limits.html", _context())


@require_POST
@member_page(permission=Permission.LIMITS_MANAGE)
def set_limit(request: ConsoleRequest) -> HttpResponse:
    form = LimitForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        with ErrorsShown(form):
            services.rate_limit_set(
                api_key_id=data["api_key"].pk if data["api_key"] else None,
                model=data["model"],
                by=request.member.principal,
                **{name: data[name] for name in RateLimit.RATES},
            )
            messages.success(request, "The limit is set. It takes effect within a second.")
            return redirect("console:limits")
    context = _context() | {"limit_form": form}
    return render(request, "console/limits.html", context, status=422)


@require_POST
@member_page(permission=Permission.LIMITS_MANAGE)
def remove_limit(request: ConsoleRequest, limit_id: uuid.UUID) -> HttpResponse:
    row = services.rate_limit_get(limit_id=limit_id)
    services.limit_remove(row, by=request.member.principal)
    messages.success(request, "The limit is removed.")
    return redirect("console:limits")


@require_POST
@member_page(permission=Permission.LIMITS_MANAGE)
def set_budget(request: ConsoleRequest) -> HttpResponse:
    form = BudgetForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        with ErrorsShown(form):
            services.budget_set(
                api_key_id=data["api_key"].pk if data["api_key"] else None,
                period=data["period"],
                by=request.member.principal,
                hard_limit=data["hard_limit"],
                soft_limit=data["soft_limit"],
            )
            messages.success(request, "The budget is set. It takes effect within a second.")
            return redirect("console:limits")
    context = _context() | {"budget_form": form}
    return render(request, "console/limits.html", context, status=422)


@require_POST
@member_page(permission=Permission.LIMITS_MANAGE)
def remove_budget(request: ConsoleRequest, budget_id: uuid.UUID) -> HttpResponse:
    row = services.budget_get(budget_id=budget_id)
    services.limit_remove(row, by=request.member.principal)
    messages.success(request, "The budget is removed.")
    return redirect("console:limits")


def _context() -> dict[str, Any]:
    rates = list(RateLimit.objects.select_related("api_key").order_by("api_key__name", "model"))
    budgets = list(Budget.objects.select_related("api_key").order_by("api_key__name", "period"))
    meters, states = limit_meters.meters(rates), limit_meters.budget_states(budgets)
    return {
        "rates": [{"row": row, "meters": meters[row.pk]} for row in rates],
        "budgets": [{"row": row, "state": states[row.pk]} for row in budgets],
        "limit_form": LimitForm(),
        "budget_form": BudgetForm(),
    }
