"""/api/v1/requests: the log of what was asked, never of its words."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api import PAGE_PARAMETERS, TenantAPIView, page, page_of
from controlplane.errors import NotFound
from controlplane.inference.models import InferenceRequest
from controlplane.tenants.auth import Permission

_FILTERS = {
    "model": "Only requests that named this model.",
    "finish_reason": "Only requests that ended so: stop, length, cancelled, error, …",
}


class InferenceRequestSerializer(serializers.ModelSerializer[InferenceRequest]):
    object = serializers.CharField(default="request", read_only=True)
    id = serializers.CharField(source="request_id", help_text="As in the header x-request-id.")
    cursor = serializers.UUIDField(source="pk")

    class Meta:
        model = InferenceRequest
        fields = (
            *("id", "object", "cursor", "model", "base_model", "api_key_id", "stream"),
            *("finish_reason", "error_code", "accepted_at", "queue_ms", "load_ms"),
            *("first_token_ms", "total_ms"),
        )


class RequestsView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema(
        "requests_list",
        [*PAGE_PARAMETERS, *(OpenApiParameter(n, str, description=d) for n, d in _FILTERS.items())],
        responses=page_of(InferenceRequestSerializer),
    )
    def get(self, request: Request) -> Response:
        """The tenant's requests that have ended, newest first."""
        rows = InferenceRequest.objects.all()
        for name in _FILTERS:
            wanted = request.query_params.get(name)
            if wanted is not None:
                rows = rows.filter(**{name: wanted}) if "\0" not in wanted else rows.none()
        return page(request, rows, InferenceRequestSerializer, cursor="cursor")


class RequestView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema(responses=InferenceRequestSerializer)
    def get(self, request: Request, request_id: str) -> Response:
        row = None
        if "\0" not in request_id:
            row = InferenceRequest.objects.filter(request_id=request_id).first()
        if row is None:
            raise NotFound("There is no such request, or it has not ended.")
        return Response(InferenceRequestSerializer(row).data)
