"""Read-only pages for usage."""

from __future__ import annotations

from django.contrib import admin

from controlplane.operator.admin.base import ReadOnlyAdmin
from controlplane.usage.models import UsageRecord


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = (
        "occurred_at",
        "tenant",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
    )
    list_filter = ("finish_reason", "base_model", "tenant")
    search_fields = ("request_id", "model", "tenant__slug")
    list_select_related = ("tenant",)
    date_hierarchy = "occurred_at"
    ordering = ("-occurred_at",)
