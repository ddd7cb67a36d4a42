"""/ops/v1/service-keys. Only people use it: no service key can make or widen one."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.account.tenants import ApiKeyRotateSerializer
from controlplane.management.base import StrictSerializer
from controlplane.management.fields import ChoiceField
from controlplane.operator.access import OperatorAPIView
from controlplane.operator.service_keys import services
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.operator.service_keys.scopes import SCOPES
from controlplane.tenants.key_rules import MAX_ALLOWED

_SCOPES_HELP = "The key's scopes. A write scope also allows reading the same objects."
_IPS_HELP = "Addresses and networks from which it may be used. Empty: all."


class ServiceKeySerializer(serializers.ModelSerializer[ServiceKey]):
    object = serializers.CharField(default="service_key", read_only=True)
    scopes = serializers.ListField(child=serializers.ChoiceField(SCOPES), help_text=_SCOPES_HELP)
    allowed_ips = serializers.ListField(child=serializers.CharField(), help_text=_IPS_HELP)
    created_by = serializers.UUIDField(
        source="created_by_id", allow_null=True, help_text="The operator who made it, if any."
    )
    old_secret_until = serializers.DateTimeField(
        allow_null=True, help_text="Until when the previous secret works."
    )

    class Meta:
        model = ServiceKey
        fields = (
            "id", "object", "public_id", "name", "last4", "scopes", "allowed_ips",
            "created_by", "created_at", "expires_at", "old_secret_until", "revoked_at",
            "last_used_at",
        )  # fmt: skip


class ServiceKeyCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=100)
    scopes = serializers.ListField(
        child=ChoiceField(SCOPES),
        allow_empty=False,
        max_length=MAX_ALLOWED,
        help_text=_SCOPES_HELP,
    )
    expires_at = serializers.DateTimeField(
        required=False, allow_null=True, default=None, help_text="Null: never."
    )
    allowed_ips = serializers.ListField(
        child=serializers.CharField(max_length=50),
        required=False,
        default=list,
        max_length=MAX_ALLOWED,
        help_text=_IPS_HELP,
    )


class ServiceKeyCreatedSerializer(ServiceKeySerializer):
    key = serializers.CharField(help_text="The key itself. It is shown only this time.")

    class Meta(ServiceKeySerializer.Meta):
        fields = (*ServiceKeySerializer.Meta.fields, "key")  # type: ignore[assignment]


def _shown(service_key: ServiceKey, text: str) -> dict[str, Any]:
    return {**ServiceKeySerializer(service_key).data, "key": text}


class ServiceKeysView(OperatorAPIView):
    @extend_schema(
        "ops_service_keys_list", PAGE_PARAMETERS, responses=page_of(ServiceKeySerializer)
    )
    def get(self, request: Request) -> Response:
        """List all service keys, newest first, without their secrets."""
        return page(request, ServiceKey.objects.all(), ServiceKeySerializer)

    @extend_schema(
        "ops_service_keys_create",
        request=ServiceKeyCreateSerializer,
        responses={201: ServiceKeyCreatedSerializer},
    )
    def post(self, request: Request) -> Response:
        """Make a service key. The answer has its text, which cannot be read again."""
        body = ServiceKeyCreateSerializer.parsed(request)
        service_key, text = services.service_key_create(**body, created_by=self.operator.user)
        return Response(_shown(service_key, text), status=201)


class ServiceKeyView(OperatorAPIView):
    @extend_schema("ops_service_keys_retrieve", responses=ServiceKeySerializer)
    def get(self, request: Request, public_id: str) -> Response:
        """Return a service key, without its secret."""
        return Response(ServiceKeySerializer(services.service_key_get(public_id=public_id)).data)


class ServiceKeyRotateView(OperatorAPIView):
    @extend_schema(
        "ops_service_keys_rotate",
        request=ApiKeyRotateSerializer,
        responses=ServiceKeyCreatedSerializer,
    )
    def post(self, request: Request, public_id: str) -> Response:
        """Give a service key a new secret. The old one still works during the grace period."""
        services.service_key_get(public_id=public_id)
        body = ApiKeyRotateSerializer.parsed(request)
        service_key, text = services.service_key_rotate(
            public_id=public_id, grace_s=body["grace_seconds"]
        )
        return Response(_shown(service_key, text))


class ServiceKeyRevokeView(OperatorAPIView):
    @extend_schema("ops_service_keys_revoke", request=None, responses=ServiceKeySerializer)
    def post(self, request: Request, public_id: str) -> Response:
        """Revoke a service key; its next request is refused."""
        service_key = services.service_key_revoke(public_id=public_id)
        return Response(ServiceKeySerializer(service_key).data)
