"""/api/v1/requests/{id}/usage."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import NotFound
from controlplane.management.base import TenantAPIView
from controlplane.tenants.permissions import Permission
from controlplane.usage.models import UsageRecord

MAX_ID_CHARS = 64


class RequestUsageSerializer(serializers.ModelSerializer[UsageRecord]):
    class Meta:
        model = UsageRecord
        fields = (
            "request_id",
            "api_key_id",
            "model",
            "base_model",
            "adapter_version_id",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "finish_reason",
            "occurred_at",
        )


class RequestUsageView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema("request_usage", responses=RequestUsageSerializer)
    def get(self, request: Request, request_id: str) -> Response:
        """Return the usage of one request; 404 until it has ended."""
        record = None
        if len(request_id) <= MAX_ID_CHARS and "\0" not in request_id:
            record = UsageRecord.objects.allowed().filter(request_id=request_id).first()
        if record is None:
            raise NotFound("There is no such request, or it has not ended.")
        return Response(RequestUsageSerializer(record).data)
