"""Read-only pages for usage."""

from __future__ import annotations

from django.contrib import admin

from controlplane.operator.admin.inference import RequestRowsAdmin
from controlplane.usage.models import UsageRecord


@admin.register(UsageRecord)
class UsageRecordAdmin(RequestRowsAdmin):
    time_column = "occurred_at"
    list_display = (
        "occurred_at",
        "tenant",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
    )
