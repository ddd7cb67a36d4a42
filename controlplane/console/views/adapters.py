"""Pages of adapters and their versions."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, Promotion
from controlplane.console import overview as reads
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.errors import ApiError
from controlplane.tenants.auth import Permission
from controlplane.training.models import Schedule, TrainingRun

Status = AdapterVersion.Status

#: The states in which a version's page reloads its status every second.
BUSY_STATES = (Status.UPLOADING.value, Status.UPLOADED.value, Status.VALIDATING.value)
_STEPS = (
    (Status.UPLOADING, "Uploading"),
    (Status.UPLOADED, "Uploaded"),
    (Status.VALIDATING, "Checking"),
    (Status.READY, "Ready"),
)
NUM_RUNS = 10
NUM_HISTORY = 10


@require_safe
@member_page
def adapters(request: ConsoleRequest) -> HttpResponse:
    rows = reads.adapter_rows()
    context = {"adapters": rows, "adapters_busy": any(row.is_busy for row in rows)}
    return render(request, "console/adapters.html", context)


@require_safe
@member_page
def adapter(request: ConsoleRequest, name: str) -> HttpResponse:
    found = get_adapter(name)
    runs = list(
        TrainingRun.objects.filter(adapter=found)
        .select_related("adapter", "dataset", "version")
        .order_by("-created_at")[:NUM_RUNS]
    )
    context = {
        "adapter": found,
        "earlier": promotion.version_before(found),
        "history": Promotion.objects.filter(adapter=found).order_by("-created_at")[:NUM_HISTORY],
        "policies": Adapter.PromotionPolicy.choices,
        "versions": found.versions.select_related("created_by").order_by("-number"),
        "schedule": Schedule.objects.filter(adapter=found).select_related("dataset").first(),
        "runs": runs,
        "runs_busy": any(run.status in TrainingRun.ACTIVE for run in runs),
        "base_url": settings.BASE_URL,
    }
    return render(request, "console/adapter.html", context)


@require_safe
@member_page
def version(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    return render(request, "console/version.html", _version_context(name, number))


@require_safe
@member_page
def version_status(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Render the part of a version's page that changes during the check."""
    return render(request, "console/_version.html", _version_context(name, number))


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def promote(request: ConsoleRequest, name: str, number: int) -> HttpResponse:
    """Make a version live."""
    found = get_adapter(name)
    version = get_object_or_404(AdapterVersion, adapter=found, number=number)
    try:
        promotion.adapter_version_promote(version=version, reason=_reason(request))
    except ApiError as error:
        messages.error(request, error.message)
        return redirect("console:version", name, number)
    messages.success(request, f"Version {number} is live.")
    return redirect("console:adapter", name)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def roll_back(request: ConsoleRequest, name: str) -> HttpResponse:
    """Make the version live that was so before."""
    try:
        found = promotion.adapter_roll_back(adapter=get_adapter(name), reason=_reason(request))
    except ApiError as error:
        messages.error(request, error.message)
    else:
        assert found.live_version is not None
        messages.success(request, f"Version {found.live_version.number} is live again.")
    return redirect("console:adapter", name)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def set_policy(request: ConsoleRequest, name: str) -> HttpResponse:
    """Set what happens to versions that become ready."""
    policy = request.POST.get("promotion_policy", "")
    if policy not in Adapter.PromotionPolicy.values:
        raise Http404
    promotion.promotion_policy_set(adapter=get_adapter(name), policy=policy)
    messages.success(request, "The policy for new versions is set.")
    return redirect("console:adapter", name)


def _reason(request: ConsoleRequest) -> str:
    return request.POST.get("reason", "").strip()


def get_adapter(name: str) -> Adapter:
    """Return the tenant's adapter. Raises Http404 if there is none of this name."""
    found = Adapter.objects.filter(name=name).select_related("base_model", "live_version").first()
    if found is None:
        raise Http404
    return found


def _version_context(name: str, number: int) -> dict[str, Any]:
    found = get_adapter(name)
    row = found.versions.filter(number=number).select_related("created_by").first()
    if row is None:
        raise Http404
    is_live = row.id == found.live_version_id
    return {
        "adapter": found,
        "version": row,
        "run": row.training_runs.first(),
        "steps": version_steps(row.status),
        "facts": _facts(row.report),
        "busy_states": BUSY_STATES,
        "base_url": settings.BASE_URL,
        "model_name": found.name if is_live else f"{found.name}@{row.number}",
    }


def version_steps(status: str) -> list[dict[str, str]]:
    """Return the steps to `ready`, each "done", "now", "failed" or "" (not begun)."""
    if status == Status.REJECTED:
        labels = [label for _, label in _STEPS[:-1]]
        return [
            *({"label": label, "state": "done"} for label in labels),
            {"label": "Rejected", "state": "failed"},
        ]
    at = [state.value for state, _ in _STEPS].index(status)
    last = len(_STEPS) - 1
    return [
        {
            "label": label,
            "state": "done" if i < at or at == last else "now" if i == at else "",
        }
        for i, (_, label) in enumerate(_STEPS)
    ]


#: Facts from the check, in the order of the page, with their labels.
_FACTS = {
    "target_modules": "Adapted layers",
    "num_parameters": "Parameters",
    "dtypes": "Data type",
    "peft_version": "Saved by PEFT",
    "claimed_base": "Trained on, it says",
}


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for name, label in _FACTS.items():
        value = report.get(name)
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        if value:
            facts.append((label, f"{value:,}" if isinstance(value, int) else str(value)))
    return facts
