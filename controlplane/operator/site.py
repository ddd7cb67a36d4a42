"""The operator's site: its menu and its look."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse
from unfold.sites import UnfoldAdminSite

#: Groups of (title, icon of Material Symbols, view), in the order of an operator's work.
_MENU = {
    "Platform": (
        ("Base models", "deployed_code", "adapters_basemodel_changelist"),
        ("Requests", "swap_vert", "inference_inferencerequest_changelist"),
        ("Usage", "bar_chart", "usage_usagerecord_changelist"),
    ),
    "Tenants": (
        ("Tenants", "domain", "tenants_tenant_changelist"),
        ("Users", "person", "tenants_user_changelist"),
        ("Memberships", "group", "tenants_membership_changelist"),
        ("API keys", "key", "tenants_apikey_changelist"),
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
    """The menu in the form that unfold takes."""
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
    """The admin site of the people who run the platform."""
