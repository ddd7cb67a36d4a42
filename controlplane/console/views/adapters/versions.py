"""Changes of a version on its page: deprecate, retire, take back; its files and differences."""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable
from typing import Any, cast

from django.contrib import messages
from django.http import Http404, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.adapters import downloads, probing, retirement, services
from controlplane.adapters.models import AdapterVersion
from controlplane.console.access import ConsoleRequest, Page, member_page
from controlplane.console.forms import ErrorsShown
from controlplane.errors import ApiError
from controlplane.tenants.auth import Permission
from controlplane.training.runs import comparison


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def deprecate(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Mark it as deprecated, and set or clear its last day."""
    text = request.POST.get("shutdown_date", "").strip()
    try:
        day = dt.date.fromisoformat(text) if text else None
    except ValueError:
        messages.error(request, "Write the day as 2027-01-14.")
        return redirect("console:version", name, number)
    version = services.adapter_version_get(name=name, number=number)
    with ErrorsShown(request):
        retirement.version_deprecate(version=version, shutdown_date=day)
        end = f" and refused from {day} on" if day else ""
        messages.success(request, f"Version {number} is deprecated{end}.")
    return redirect("console:version", name, number)


def _button(change: Callable[..., AdapterVersion], state: str) -> Page:
    """Return the view of a button that changes a version and shows its page again."""

    @require_POST
    @member_page(permission=Permission.ADAPTERS_WRITE)
    def press(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
        version = services.adapter_version_get(name=name, number=number)
        with ErrorsShown(request):
            change(version=version)
            messages.success(request, f"Version {number} is {state}.")
        return redirect("console:version", name, number)

    return cast(Page, press)


undeprecate = _button(retirement.version_undeprecate, "no longer deprecated")
retire = _button(retirement.version_retire, "retired")
keep_original = _button(
    functools.partial(probing.version_original_set, keeps_original=True),
    "answered with its original",
)
allow_copy = _button(
    functools.partial(probing.version_original_set, keeps_original=False),
    "answered with its copy in FP8 if that is good enough",
)
unretire = _button(retirement.version_unretire, "ready again")


@require_safe
@member_page(permission=Permission.ADAPTERS_WRITE)
def download(request: ConsoleRequest, name: str, number: int, file: str) -> HttpResponse:
    """Send the browser to a file of the version."""
    version = services.adapter_version_get(name=name, number=number)
    if file not in services.FILES:
        raise Http404
    with ErrorsShown(request):
        found = downloads.version_download(version=version)
        return HttpResponseRedirect(found.files[file].url)
    return redirect("console:version", name, number)


@require_safe
@member_page
def diff(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Show the differences from another version."""
    other = request.GET.get("with", "")
    if not (other.isascii() and other.isdigit() and len(other) <= 10):
        raise Http404
    before, after = (
        services.adapter_version_get(name=name, number=each) for each in (int(other), number)
    )
    try:
        compared = comparison.versions_compare(before, after)
    except ApiError as error:
        messages.error(request, error.message)
        return redirect("console:version", name, number)
    rows = [
        {
            "area": change.area,
            "field": change.field,
            "before": _text(change.before),
            "after": _text(change.after),
        }
        for change in compared.changes
    ]
    context = {"adapter": after.adapter, "before": before, "after": after, "changes": rows}
    return render(request, "console/diff.html", context)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
