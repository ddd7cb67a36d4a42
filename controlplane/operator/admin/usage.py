"""Read-only pages for usage."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import Q

from controlplane.operator.admin.inference import RequestRowsAdmin
from controlplane.usage.models import UsageRecord


@admin.register(UsageRecord)
class UsageRecordAdmin(RequestRowsAdmin):
    time_column = "occurred_at"
    # The months have no index of prefixes: it would cost every record.
    search_prefixes = ()
    search_help_text = "A whole request id, or a tenant"
    list_display = (
        "occurred_at",
        "tenant",
        "model",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "finish_reason",
    )

    def search_q(self, term: str) -> Q:
        return super().search_q(term) | Q(request_id=term)
