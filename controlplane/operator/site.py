"""The operator's site: its menu, who may enter, and how long a page may take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.db import OperationalError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.response import SimpleTemplateResponse
from django.templatetags.static import static
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode
from psycopg.errors import QueryCanceled
from unfold.sites import UnfoldAdminSite

from controlplane.operator.pages import dead_letters, health, quarantine, queues, workers
from controlplane.tenancy.scope import statement_timeout_ms
from controlplane.tenants.second_factor import is_kept_out

#: Time after which a page's statement is cancelled, so that no list slows the platform.
STATEMENT_TIMEOUT_MS = 3000

#: Groups of (title, icon of Material Symbols, view).
_MENU = {
    "Platform": (
        ("Live pool", "memory", "workers"),
        ("Queues", "hourglass_top", "queues"),
        ("Dead letters", "mail_off", "dead_letters"),
        ("Quarantine", "gpp_bad", "quarantine"),
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


def style(request: HttpRequest) -> str:
    return static("operator/pages.css")


def script(request: HttpRequest) -> str:
    return static("operator/names.js")


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
    """The admin site, with the pages of `controlplane.operator.pages`."""

    index_template = "operator/index.html"
    index_title = "Health"

    def has_permission(self, request: HttpRequest) -> bool:
        """Return whether an operator asks; it queries once per page."""
        if not super().has_permission(request):
            return False
        if not hasattr(request, "operator_is_kept_out"):
            request.operator_is_kept_out = is_kept_out(request.user)  # type: ignore[attr-defined, arg-type]
        return not request.operator_is_kept_out  # type: ignore[attr-defined]

    def extra_urls(self) -> list[URLPattern]:
        pages: list[tuple[str, Callable[..., HttpResponse], str]] = [
            ("workers/", workers.live_pool, "workers"),
            ("workers/<path:worker_id>/drain/", workers.drain, "drain"),
            ("workers/<path:worker_id>/resume/", workers.resume, "resume"),
            ("queues/", queues.queues, "queues"),
            ("dead-letters/", dead_letters.dead_letters, "dead_letters"),
            ("dead-letters/requeue/", dead_letters.requeue, "requeue"),
            ("dead-letters/discard/", dead_letters.discard, "discard"),
            ("quarantine/", quarantine.quarantine, "quarantine"),
            ("quarantine/<str:digest>/release/", quarantine.release, "release"),
        ]
        return [path(route, self.admin_view(view), name=name) for route, view, name in pages]

    def admin_view(self, view: Any, cacheable: bool = False) -> Any:
        """Return the view for operators only; slow statements are cancelled.

        It renders its answer, because templates query, too.
        """
        inner = super().admin_view(view, cacheable)

        @functools.wraps(inner)
        def bounded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            token = statement_timeout_ms.set(STATEMENT_TIMEOUT_MS)
            try:
                answer: HttpResponse = inner(request, *args, **kwargs)
                return answer.render() if isinstance(answer, SimpleTemplateResponse) else answer
            except OperationalError as error:
                if not isinstance(error.__cause__, QueryCanceled):
                    raise
                return self._too_slow(request)
            finally:
                statement_timeout_ms.reset(token)

        return bounded

    def _too_slow(self, request: HttpRequest) -> HttpResponse:
        context = {**self.each_context(request), "title": "This took too long"}
        context["seconds"] = STATEMENT_TIMEOUT_MS // 1000
        return render(request, "operator/too_slow.html", context, status=503)

    def index(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the platform's health, and below it all lists."""
        answer: HttpResponse = super().index(request, {"tiles": health.tiles()})
        return answer

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
        if request.headers.get("HX-Request"):
            # A part of a page was requested after the session ended: open the whole page.
            return HttpResponse(headers={"HX-Refresh": "true"})
        target = request.GET.get(REDIRECT_FIELD_NAME) or reverse("admin:index")
        return redirect(f"{settings.LOGIN_URL}?{urlencode({REDIRECT_FIELD_NAME: target})}")
