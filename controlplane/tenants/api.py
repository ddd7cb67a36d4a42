"""/api/v1/keys."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.api import PAGE_PARAMETERS, StrictSerializer, TenantAPIView, page, page_of
from controlplane.tenants import services
from controlplane.tenants.auth import Permission
from controlplane.tenants.models import ApiKey


class ApiKeySerializer(serializers.ModelSerializer[ApiKey]):
    object = serializers.CharField(default="api_key", read_only=True)

    class Meta:
        model = ApiKey
        fields = (
            *("id", "object", "public_id", "name", "last4", "created_at"),
            *("expires_at", "revoked_at", "last_used_at"),
        )


class ApiKeyCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=100)
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None)


class ApiKeyCreatedSerializer(ApiKeySerializer):
    key = serializers.CharField(help_text="The key itself; this is the only time it is shown.")

    class Meta(ApiKeySerializer.Meta):
        fields = (*ApiKeySerializer.Meta.fields, "key")  # type: ignore[assignment]


class ApiKeysView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.KEYS_MANAGE}

    @extend_schema("keys_list", PAGE_PARAMETERS, responses=page_of(ApiKeySerializer))
    def get(self, request: Request) -> Response:
        """The tenant's keys, newest first; never their secrets."""
        return page(request, ApiKey.objects.all(), ApiKeySerializer)

    @extend_schema(request=ApiKeyCreateSerializer, responses={201: ApiKeyCreatedSerializer})
    def post(self, request: Request) -> Response:
        """Make a key. The answer has its text, which cannot be had again."""
        body = ApiKeyCreateSerializer.parsed(request)
        api_key, text = services.api_key_create(
            name=body["name"], expires_at=body["expires_at"], created_by=self.principal.user
        )
        return Response({**ApiKeySerializer(api_key).data, "key": text}, status=201)


class ApiKeyRevokeView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.KEYS_MANAGE}

    @extend_schema(request=None, responses=ApiKeySerializer)
    def post(self, request: Request, public_id: str) -> Response:
        """End a key for good; it stops working within a second."""
        return Response(ApiKeySerializer(services.api_key_revoke(public_id=public_id)).data)
