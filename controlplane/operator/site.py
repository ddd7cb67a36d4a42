"""The operator's site: its menu, and the page of live workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.response import TemplateResponse
from django.templatetags.static import static
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode
from unfold.sites import UnfoldAdminSite

from controlplane.errors import Unavailable
from controlplane.queue.workers import WorkerStatus, workers
from controlplane.tenants.second_factor import is_kept_out

#: Groups of (title, icon of Material Symbols, view).
_MENU = {
    "Platform": (
        ("Workers", "memory", "workers"),
        ("Base models", "deployed_code", "adapters_basemodel_changelist"),
        ("Requests", "swap_vert", "inference_inferencerequest_changelist"),
        ("Usage", "bar_chart", "usage_usagerecord_changelist"),
    ),
    "Tenants": (
        ("Tenants", "domain", "tenants_tenant_changelist"),
        ("Users", "person", "tenants_user_changelist"),
        ("Memberships", "group", "tenants_membership_changelist"),
        ("API keys", "key", "tenants_apikey_changelist"),
        ("Deleted tenants", "delete_forever", "deletion_tenantdeletion_changelist"),
    ),
    "Models": (
        ("Adapters", "layers", "adapters_adapter_changelist"),
        ("Adapter versions", "history", "adapters_adapterversion_changelist"),
        ("Training runs", "model_training", "training_trainingrun_changelist"),
        ("Schedules", "schedule", "training_schedule_changelist"),
        ("Datasets", "dataset", "training_dataset_changelist"),
    ),
}


def logo(request: HttpRequest) -> str:
    return static("console/logo.svg")


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """Return the menu in unfold's format."""
    return [
        {
            "title": group,
            "items": [
                {"title": title, "icon": icon, "link": reverse(f"admin:{view}")}
                for title, icon, view in entries
            ],
        }
        for group, entries in _MENU.items()
    ]


class OperatorSite(UnfoldAdminSite):  # type: ignore[misc]
    """The admin site, with a page of workers."""

    def has_permission(self, request: HttpRequest) -> bool:
        """Return whether an operator asks. Called several times per page; queries only once."""
        if not super().has_permission(request):
            return False
        if not hasattr(request, "operator_is_kept_out"):
            request.operator_is_kept_out = is_kept_out(request.user)  # type: ignore[attr-defined, arg-type]
        return not request.operator_is_kept_out  # type: ignore[attr-defined]

    def extra_urls(self) -> list[URLPattern]:
        return [path("workers/", self.admin_view(self.workers), name="workers")]

    def login(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect to the console's sign-in, which slows down guessing.

        People who are signed in but may not enter come here, too: operators without a second factor
        are redirected to the page where they set one up.
        """
        if super().has_permission(request):
            is_in = self.has_permission(request)
            return redirect("admin:index" if is_in else "console:security")
        if request.user.is_authenticated:
            return render(request, "operator/refused.html", status=403)
        target = request.GET.get(REDIRECT_FIELD_NAME) or reverse("admin:index")
        return redirect(f"{settings.LOGIN_URL}?{urlencode({REDIRECT_FIELD_NAME: target})}")

    def workers(self, request: HttpRequest) -> TemplateResponse:
        """Show the workers that send heartbeats, from Redis."""
        problem, found = "", []
        try:
            found = sorted(workers(), key=lambda worker: worker.heartbeat.worker_id)
        except Unavailable as error:
            problem = error.message
        context = {
            **self.each_context(request),
            "title": "Workers",
            "pool": settings.POOL,
            "problem": problem,
            "table": {"headers": _HEADERS, "rows": [_row(worker) for worker in found]},
        }
        return TemplateResponse(request, "operator/workers.html", context)


_HEADERS = [
    "Worker",
    "State",
    "Base model",
    "Device",
    "Running",
    "Waiting",
    "Free pages",
    "Adapters",
    "Tokens/s",
    "Step",
    "Last heartbeat",
]
#: How many of a worker's resident adapters are named.
_SHOWN_ADAPTERS = 3


def _row(worker: WorkerStatus) -> list[str]:
    beat = worker.heartbeat
    return [
        beat.worker_id,
        _state(worker),
        beat.base_model,
        beat.device,
        f"{beat.running} / {beat.max_running}",
        str(beat.waiting),
        f"{beat.free_pages} / {beat.num_pages}",
        _adapters(beat.resident_digests),
        f"{beat.tokens_per_s:.0f}",
        str(beat.step),
        f"{worker.silent_s:.0f} s ago",
    ]


def _state(worker: WorkerStatus) -> str:
    if not worker.is_alive:
        return "silent"
    if worker.heartbeat.draining:
        return "draining"
    return "loading" if worker.heartbeat.loading else "alive"


def _adapters(digests: Sequence[str]) -> str:
    """Return how many there are, and the first digits of some."""
    if not digests:
        return "none"
    shown = ", ".join(digest[:8] for digest in digests[:_SHOWN_ADAPTERS])
    more = ", …" if len(digests) > _SHOWN_ADAPTERS else ""
    return f"{len(digests)}: {shown}{more}"
