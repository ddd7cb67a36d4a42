"""The tenant's audit trail: search it and verify it."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpResponse
from django.shortcuts import render
from django.utils.http import urlencode
from django.views.decorators.http import require_POST, require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import AuditForm
from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import verify
from controlplane.tenants.auth import Permission

PAGE = 50


@require_safe
@member_page(permission=Permission.AUDIT_READ)
def audit(request: ConsoleRequest) -> HttpResponse:
    form = AuditForm(request.GET)
    rows = AuditEvent.objects.order_by("-seq")
    if form.is_valid():
        rows = _matching(rows, form.cleaned_data)
    before = request.GET.get("before", "")
    if before.isascii() and before.isdigit():
        rows = rows.filter(seq__lt=min(int(before[:18]), 2**62))
    found = list(rows[: PAGE + 1])
    query = [(name, request.GET.get(name, "")) for name in form.fields if request.GET.get(name)]
    older = urlencode([*query, ("before", found[PAGE - 1].seq)]) if len(found) > PAGE else None
    actions = AuditEvent.objects.order_by("action").values_list("action", flat=True).distinct()
    context = {
        "form": form,
        "events": found[:PAGE],
        "older": older,
        "is_first": not before,
        "newest": urlencode(query),
        "actions": list(actions[:200]),
    }
    return render(request, "console/audit.html", context)


@require_POST
@member_page(permission=Permission.AUDIT_READ)
def verify_trail(request: ConsoleRequest) -> HttpResponse:
    """Verify the whole chain now and show the result."""
    head, faults = verify(request.member.tenant.id)
    context = {"head": head, "faults": faults[:20]}
    return render(request, "console/_verified.html", context)


def _matching(rows: QuerySet[AuditEvent], wanted: dict[str, Any]) -> QuerySet[AuditEvent]:
    if action := wanted["action"]:
        rows = rows.filter(action__startswith=action)
    if actor := wanted["actor"]:
        is_platform = actor.casefold() == "the platform"  # as the page calls it
        system = Q(actor_type=AuditEvent.ActorType.SYSTEM) if is_platform else Q()
        rows = rows.filter(system or Q(actor_name__icontains=actor) | Q(actor_id=actor))
    if resource := wanted["resource_id"]:
        rows = rows.filter(resource_id=resource)
    if isinstance(since := wanted["since"], dt.date):
        rows = rows.filter(occurred_at__gte=dt.datetime.combine(since, dt.time.min, dt.UTC))
    if isinstance(until := wanted["until"], dt.date):
        rows = rows.filter(occurred_at__lte=dt.datetime.combine(until, dt.time.max, dt.UTC))
    return rows
