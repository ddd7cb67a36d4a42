"""The request log, without prompts and answers."""

from __future__ import annotations

from typing import ClassVar

from django.contrib import admin
from django.http import HttpRequest

from contract.messages.protocol import FinishReason
from controlplane.operator.admin.base import ReadOnlyAdmin
from controlplane.operator.admin.lists import (
    TENANT,
    BaseModelNameFilter,
    ChoiceFilter,
    SinceFilter,
)
from controlplane.requestlog.inference_request import InferenceRequest


class FinishReasonFilter(ChoiceFilter):
    title, parameter_name = "finish reason", "finish_reason"

    def lookups(self, request: HttpRequest, model_admin: object) -> list[tuple[str, str]]:
        return [(reason.value, reason.value) for reason in FinishReason]


class RequestRowsAdmin(ReadOnlyAdmin):
    """Rows of requests: millions, and searched by the request's id or by tenant.

    The newest ids come first. A tenant's rows come by their time, for which it has an index.
    """

    list_filter: ClassVar[tuple[object, ...]] = (
        SinceFilter,
        FinishReasonFilter,
        BaseModelNameFilter,
        TENANT,
    )
    search_prefixes: ClassVar[tuple[str, ...]] = ("request_id",)
    search_help_text = "A request id, or a tenant"
    list_select_related = ("tenant",)
    #: The column of the index of a tenant's rows.
    time_column = ""

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        if request.GET.get("tenant__id__exact"):
            return (f"-{self.time_column}", "-pk")
        return ("-pk",)


@admin.register(InferenceRequest)
class InferenceRequestAdmin(RequestRowsAdmin):
    time_column = "accepted_at"
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
