"""Captured requests: their numbers, datasets of them, and their deletion."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.contrib import messages
from django.db.models import Count, Q, Sum
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.evaluation_forms import FromCapturedForm
from controlplane.console.forms import ErrorsShown
from controlplane.requestlog.capture import capture_policy
from controlplane.requestlog.captured import Filter, captures_delete
from controlplane.requestlog.models import Rating
from controlplane.tenants.auth import Permission, authorize
from controlplane.training.datasets.captured_rows import dataset_from_captured

NUM_ROWS = 50


@require_safe
@member_page(permission=Permission.REQUESTS_READ)
def captured(request: ConsoleRequest) -> HttpResponse:
    return _page(request, FromCapturedForm())


@require_POST
@member_page(permission=Permission.REQUESTS_CONTENT)
def make_dataset(request: ConsoleRequest) -> HttpResponse:
    authorize(request.member.principal, Permission.TRAINING_WRITE)
    form = FromCapturedForm(request.POST)
    if form.is_valid():
        data = form.cleaned_data
        day = data["after"]
        after = dt.datetime.combine(day, dt.time.min, dt.UTC) if day else None
        wanted = Filter(only=data["only"], model=data["model"] or None, after=after)
        with ErrorsShown(form):
            made = dataset_from_captured(name=data["name"], wanted=wanted, appends=data["append"])
            left = f" {made.num_left_out} gave no row." if made.num_left_out else ""
            said = f"“{made.dataset.name}” is stored, with {made.dataset.num_rows} chats.{left}"
            messages.success(request, said)
            return redirect("console:dataset", made.dataset.name)
    return _page(request, form, status=422)


@require_POST
@member_page(permission=Permission.REQUESTS_CONTENT)
def erase(request: ConsoleRequest) -> HttpResponse:
    """Erase all captured requests."""
    num = captures_delete(wanted=Filter(only="any"))
    messages.success(request, f"{num} captured requests are erased.")
    return redirect("console:captured")


def _page(request: ConsoleRequest, form: FromCapturedForm, status: int = 200) -> HttpResponse:
    rows = Filter(only="any").rows()
    totals: dict[str, Any] = rows.aggregate(
        num=Count("pk"),
        num_bytes=Sum("num_bytes"),
        good=Count("pk", filter=Q(rating=Rating.GOOD)),
        bad=Count("pk", filter=Q(rating=Rating.BAD)),
        corrected=Count("pk", filter=~Q(sealed_answer=b"")),
    )
    context = {
        "policy": capture_policy(),
        "rows": rows.defer("sealed")[:NUM_ROWS],
        "totals": totals,
        "form": form,
    }
    return render(request, "console/captured.html", context, status=status)
