"""Pages of adapters and their versions."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.adapters import promotion, retirement, services
from controlplane.adapters.models import Adapter, AdapterVersion, Promotion
from controlplane.console import overview as reads
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.evaluation_rows import gate_rows
from controlplane.console.forms import ErrorsShown
from controlplane.console.residency import prefetched_text, residency_of
from controlplane.errors import require
from controlplane.evaluations.models import GateDecision
from controlplane.queue.placement.residency import before_switch
from controlplane.tenants.auth import Permission
from controlplane.training.models import Schedule, TrainingRun

Status = AdapterVersion.Status

#: States in which a version's page reloads its status every second.
BUSY_STATES = (Status.UPLOADING.value, Status.UPLOADED.value, Status.VALIDATING.value)
_STEPS = (
    (Status.UPLOADING, "Uploading"),
    (Status.UPLOADED, "Uploaded"),
    (Status.VALIDATING, "Checking"),
    (Status.READY, "Ready"),
)
_LARGE = ("inspection__doctor", "inspection__compared", "inspection__facts")
NUM_RUNS = 10
#: Number of versions on one page.
PAGE = 50
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
    found = services.adapter_get(name=name)
    versions = found.versions.select_related("created_by").order_by("-number")
    before = request.GET.get("before", "")
    if before.isascii() and before.isdigit():
        versions = versions.filter(number__lt=min(int(before[:10]), services.MAX_NUMBER))
    shown = list(versions[: PAGE + 1])
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
        "versions": shown[:PAGE],
        "older": shown[PAGE - 1].number if len(shown) > PAGE else None,
        "is_first": not before,
        "schedule": Schedule.objects.filter(adapter=found).select_related("dataset").first(),
        "runs": runs,
        "runs_busy": any(run.status in TrainingRun.ACTIVE for run in runs),
        "base_url": settings.BASE_URL,
        "residency": residency_of(found.live_version),
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
    version = services.adapter_version_get(name=name, number=number)
    with ErrorsShown(request):
        loaded = before_switch(version)
        promotion.adapter_version_promote(version=version, reason=_reason(request))
        messages.success(request, f"Version {number} is live. {prefetched_text(loaded)}".strip())
        return redirect("console:adapter", name)
    return redirect("console:version", name, number)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def roll_back(request: ConsoleRequest, name: str) -> HttpResponse:
    """Make the version live that was live before."""
    found = services.adapter_get(name=name)
    with ErrorsShown(request):
        loaded = before_switch(promotion.version_before(found))
        found = promotion.adapter_roll_back(adapter=found, reason=_reason(request))
        assert found.live_version is not None
        number = found.live_version.number
        messages.success(
            request, f"Version {number} is live again. {prefetched_text(loaded)}".strip()
        )
    return redirect("console:adapter", name)


@require_POST
@member_page(permission=Permission.ADAPTERS_WRITE)
def set_policy(request: ConsoleRequest, name: str) -> HttpResponse:
    """Set the policy for versions that become ready."""
    policy = request.POST.get("promotion_policy", "")
    if policy not in Adapter.PromotionPolicy.values:
        raise Http404
    with ErrorsShown(request):
        promotion.promotion_policy_set(adapter=services.adapter_get(name=name), policy=policy)
        messages.success(request, "The policy for new versions is set.")
    return redirect("console:adapter", name)


def _reason(request: ConsoleRequest) -> str:
    return request.POST.get("reason", "").strip()


def _version_context(name: str, number: int) -> dict[str, Any]:
    found = services.adapter_get(name=name)
    rows = found.versions.select_related("created_by", "inspection").defer(*_LARGE)
    row = require(rows.filter(number=number).first(), "There is no such adapter version.")
    is_live = row.id == found.live_version_id
    gate = GateDecision.objects.filter(version=row).first()
    return {
        "adapter": found,
        "version": row,
        "run": row.training_runs.first(),
        "steps": version_steps(row.status),
        "facts": _facts(row.report),
        "gate": gate,
        "gate_rows": gate_rows(gate) if gate else [],
        "residency": residency_of(row),
        "files_until": retirement.files_until(row),
        "can_download": bool(row.digest) and row.removed_at is None,
        "files": services.FILES,
        "previous": found.versions.filter(number__lt=number, status__in=("ready", "retired"))
        .order_by("-number")
        .values_list("number", flat=True)
        .first(),
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
    reached = Status.READY if status == Status.RETIRED else status
    at = [state.value for state, _ in _STEPS].index(reached)
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
    "labels": "Labels of the classifier",
    "peft_version": "Saved by PEFT",
    "claimed_base": "Base model by its config",
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
