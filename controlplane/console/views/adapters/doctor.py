"""The page of the doctor's report on a version."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.adapters import probing
from controlplane.adapters.models import AdapterInspection
from controlplane.adapters.services import adapter_version_get
from controlplane.console import doctor_charts
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.forms import ErrorsShown
from controlplane.evaluations.inspections.reports import device_bytes, is_estimated
from controlplane.tenants.auth import Permission

Status = AdapterInspection.Status

_HEADINGS = {
    Status.WAITING: "Being inspected",
    Status.AGREED: "A worker computes what PEFT computes",
    Status.MISMATCH: "A worker does not compute what PEFT computes",
    Status.NOT_RUN: "Not compared on a worker yet",
}


@require_safe
@member_page
def doctor(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Show norms, spectra and effective ranks, and the probe's result."""
    version = adapter_version_get(name=name, number=number)
    inspection = AdapterInspection.objects.filter(version=version).first()
    context: dict[str, Any] = {
        "adapter": version.adapter,
        "version": version,
        "inspection": inspection,
        "device_bytes": device_bytes(version),
        "is_estimated": is_estimated(version),
        "is_busy": inspection is not None and inspection.status == Status.WAITING,
    }
    if inspection is not None:
        modules = inspection.doctor.get("modules", [])
        context |= {
            "heading": _HEADINGS[Status(inspection.status)],
            "probe": inspection.probe,
            "max_kl": settings.PRECISION_MAX_KL,
            "has_copies": "copy_nats" in inspection.probe,
            "max_nats": settings.COPY_MAX_NATS,
            "summary": inspection.doctor.get("summary"),
            "findings": inspection.doctor.get("findings", []),
            "heat": doctor_charts.heat_map(modules),
            "ranks": doctor_charts.effective_ranks(modules),
            "spectra": doctor_charts.spectra(modules),
            "scatter": doctor_charts.scatter(inspection.compared),
        }
    return render(request, "console/doctor.html", context)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def inspect(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Have a version inspected again."""
    with ErrorsShown(request):
        probing.inspection_request(adapter_version_get(name=name, number=number))
        messages.success(request, "The version is inspected. Reload this page in a minute.")
    return redirect("console:doctor", name, number)
