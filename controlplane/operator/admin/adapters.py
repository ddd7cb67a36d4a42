"""The operator's pages for base models, and read-only pages for the tenants' adapters."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html_join

from contract.adapters.base_shape import BaseShape
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.operator.admin.base import AuditedAdmin, ReadOnlyAdmin, display, json_text
from controlplane.operator.admin.lists import TENANT

#: Other names of a base model.
_MAX_NAMES = 20


class BaseModelForm(forms.ModelForm):  # type: ignore[type-arg]
    """Checks that the config has the shapes that adapters must fit."""

    def clean_config(self) -> Any:
        config = self.cleaned_data["config"]
        if not isinstance(config, dict):
            raise forms.ValidationError("Paste the model's config.json: a JSON object.")
        try:
            BaseShape.from_config(config)
        except ValueError as error:
            raise forms.ValidationError(str(error)) from error
        return config

    def clean_known_names(self) -> list[str]:
        names = self.cleaned_data["known_names"] or []
        is_list = isinstance(names, list) and len(names) <= _MAX_NAMES
        if not is_list or not all(isinstance(name, str) and len(name) <= 200 for name in names):
            raise forms.ValidationError('Write a list of names, such as ["org/name"].')
        return names


@admin.register(BaseModel)
class BaseModelAdmin(AuditedAdmin):
    form = BaseModelForm
    list_display = (
        "name",
        "is_active",
        "shutdown_date",
        "context_length",
        "max_rank",
        "short_revision",
    )
    list_filter = ("is_active",)
    search_prefixes = ("name", "revision")
    search_tenants = False

    def get_readonly_fields(self, request: HttpRequest, obj: BaseModel | None = None) -> Any:
        # Adapters were checked against these fields; another revision is another base model.
        shown = ("name", "revision", display("config", json_text), "created_at")
        return shown if obj else ("created_at",)

    def get_exclude(self, request: HttpRequest, obj: BaseModel | None = None) -> Any:
        return ("config",) if obj else None

    @admin.display(description="Revision")
    def short_revision(self, base_model: BaseModel) -> str:
        return base_model.revision[:12]


@admin.register(Adapter)
class AdapterAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "base_model", "live_number", "created_at")
    list_filter = ("base_model", TENANT)
    search_name = "name"
    search_help_text = "A tenant, or tenant/adapter"
    list_select_related = ("tenant", "base_model", "live_version")

    @admin.display(description="Live version")
    def live_number(self, adapter: Adapter) -> int | None:
        return adapter.live_version.number if adapter.live_version else None


@admin.register(AdapterVersion)
class AdapterVersionAdmin(ReadOnlyAdmin):
    list_display = ("adapter", "number", "tenant", "status", "source", "max_rank", "created_at")
    list_filter = ("status", "source", TENANT)
    search_prefixes = ("digest",)
    search_name = "adapter__name"
    search_help_text = "A tenant, tenant/adapter, or a digest"
    list_select_related = ("adapter", "tenant")
    fields = (
        "tenant",
        "adapter",
        "number",
        "status",
        "why_rejected",
        "source",
        "digest",
        "num_bytes",
        "max_rank",
        "report",
        "created_by",
        "created_at",
        "ready_at",
    )

    @admin.display(description="Why rejected")
    def why_rejected(self, version: AdapterVersion) -> str:
        reasons = ((reason.get("field"), reason.get("message")) for reason in version.reasons)
        return format_html_join("\n", "<p><code>{}</code> {}</p>", reasons) or "–"
