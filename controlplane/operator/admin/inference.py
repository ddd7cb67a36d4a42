"""The request log, without prompts and answers."""

from __future__ import annotations

from django.contrib import admin

from controlplane.operator.admin.base import ReadOnlyAdmin
from controlplane.requestlog.inference_request import InferenceRequest


@admin.register(InferenceRequest)
class InferenceRequestAdmin(ReadOnlyAdmin):
    list_display = (
        "accepted_at",
        "tenant",
        "model",
        "finish_reason",
        "error_code",
        "worker_id",
        "queue_ms",
        "first_token_ms",
        "total_ms",
    )
    list_filter = ("finish_reason", "base_model", "stream", "tenant")
    search_fields = ("request_id", "model", "worker_id", "error_code", "tenant__slug")
    list_select_related = ("tenant",)
    date_hierarchy = "accepted_at"
    ordering = ("-accepted_at",)
