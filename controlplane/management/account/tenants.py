"""/api/v1/keys."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import NotFound
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.tenants import key_services, people
from controlplane.tenants.auth import Permission, Principal
from controlplane.tenants.key_grants import inherited
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import ApiKey, Membership, ServiceAccount
from controlplane.tenants.permissions import DEFAULT_SCOPES

_SCOPES_HELP = "What the key may do, as far as its owner's role allows."
_MODELS_HELP = "Names that it may put in `model`; `invoices` covers `invoices@3`. Empty: all."
_IPS_HELP = "Addresses and networks from which it may be used. Empty: all."
_GRACE_HELP = "Seconds for which the previous secret still works."


class ApiKeySerializer(serializers.ModelSerializer[ApiKey]):
    object = serializers.CharField(default="api_key", read_only=True)
    scopes = serializers.ListField(
        child=serializers.ChoiceField([p.value for p in Permission]), help_text=_SCOPES_HELP
    )
    allowed_models = serializers.ListField(child=serializers.CharField(), help_text=_MODELS_HELP)
    allowed_ips = serializers.ListField(child=serializers.CharField(), help_text=_IPS_HELP)
    owner = serializers.UUIDField(
        source="owner_id",
        allow_null=True,
        help_text="The member who owns the key, if any.",
    )
    service_account = serializers.UUIDField(
        source="service_account_id",
        allow_null=True,
        help_text="The service account that owns the key, if any.",
    )
    parent = serializers.CharField(  # type: ignore[assignment]
        source="parent.public_id",
        default=None,
        allow_null=True,
        help_text="The public id of the key that made it, if any; its limits also apply here.",
    )
    old_secret_until = serializers.DateTimeField(
        allow_null=True, help_text="Until when the previous secret works."
    )

    class Meta:
        model = ApiKey
        fields = (
            "id", "object", "public_id", "name", "environment", "last4", "scopes",
            "allowed_models", "allowed_ips", "owner", "service_account", "parent", "created_at",
            "expires_at", "old_secret_until", "revoked_at", "last_used_at",
        )  # fmt: skip


class _RulesSerializer(StrictSerializer):
    scopes = serializers.ListField(
        child=ChoiceField([p.value for p in Permission]),
        required=False,
        allow_empty=False,
        help_text=_SCOPES_HELP,
    )
    allowed_models = serializers.ListField(
        child=serializers.CharField(max_length=80), required=False, help_text=_MODELS_HELP
    )
    allowed_ips = serializers.ListField(
        child=serializers.CharField(max_length=50), required=False, help_text=_IPS_HELP
    )


class ApiKeyCreateSerializer(_RulesSerializer):
    name = serializers.CharField(max_length=100)
    expires_at = serializers.DateTimeField(required=False, allow_null=True)
    environment = ChoiceField(
        ApiKey.Environment.choices,
        required=False,
        default="live",
        help_text="Part of the key's text.",
    )
    service_account = serializers.UUIDField(
        required=False,
        allow_null=True,
        default=None,
        help_text="The service account that owns the key. If left out, the key is yours.",
    )


class ApiKeyUpdateSerializer(_RulesSerializer):
    name = serializers.CharField(max_length=100, required=False)
    expires_at = serializers.DateTimeField(required=False, allow_null=True)


class ApiKeyRotateSerializer(StrictSerializer):
    grace_seconds = serializers.IntegerField(
        required=False,
        default=key_services.DEFAULT_GRACE_S,
        min_value=0,
        max_value=key_services.MAX_GRACE_S,
        help_text=_GRACE_HELP,
    )


class ApiKeyRevokeSerializer(StrictSerializer):
    children = serializers.BooleanField(
        required=False,
        default=True,
        help_text="Whether to revoke also the keys that it made, and those that they made.",
    )


class ApiKeyCreatedSerializer(ApiKeySerializer):
    key = serializers.CharField(help_text="The key itself. It is shown only this time.")

    class Meta(ApiKeySerializer.Meta):
        fields = (*ApiKeySerializer.Meta.fields, "key")  # type: ignore[assignment]


class ApiKeysView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.KEYS_MANAGE}

    @extend_schema("keys_list", PAGE_PARAMETERS, responses=page_of(ApiKeySerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's keys, newest first, without their secrets."""
        return page(request, ApiKey.objects.select_related("parent"), ApiKeySerializer)

    @extend_schema(request=ApiKeyCreateSerializer, responses={201: ApiKeyCreatedSerializer})
    def post(self, request: Request) -> Response:
        """Make a key. The answer has its text, which cannot be read again.

        Nobody can give a key more rights than they have. By default it has a developer's scopes,
        and the models, addresses and expiry of the key that makes it.
        """
        body = ApiKeyCreateSerializer.parsed(request)
        own = self.principal.api_key
        api_key, text = key_services.api_key_create(
            name=body["name"],
            by=self.principal,
            expires_at=body.get("expires_at", own.expires_at if own else None),
            environment=body["environment"],
            rules=_rules(body, _default_rules(self.principal)),
            owner=_owner(self.principal, body["service_account"]),
        )
        return Response({**ApiKeySerializer(api_key).data, "key": text}, status=201)


class ApiKeyView(TenantAPIView):
    permissions: ClassVar = {"PATCH": Permission.KEYS_MANAGE}

    @extend_schema(responses=ApiKeySerializer)
    def get(self, request: Request, public_id: str) -> Response:
        return Response(ApiKeySerializer(key_services.api_key_get(public_id=public_id)).data)

    @extend_schema(request=ApiKeyUpdateSerializer, responses=ApiKeySerializer)
    def patch(self, request: Request, public_id: str) -> Response:
        """Change a key's name, expiry or rules; this takes effect in a second. Its secret stays."""
        key_services.api_key_get(public_id=public_id)
        changes = ApiKeyUpdateSerializer.parsed(request)
        api_key = key_services.api_key_update(
            public_id=public_id, changes=changes, by=self.principal
        )
        return Response(ApiKeySerializer(api_key).data)


class ApiKeyRotateView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.KEYS_MANAGE}

    @extend_schema(request=ApiKeyRotateSerializer, responses=ApiKeyCreatedSerializer)
    def post(self, request: Request, public_id: str) -> Response:
        """Give a key a new secret. The old one still works during the grace period."""
        key_services.api_key_get(public_id=public_id)
        body = ApiKeyRotateSerializer.parsed(request)
        api_key, text = key_services.api_key_rotate(
            public_id=public_id, grace_s=body["grace_seconds"], by=self.principal
        )
        return Response({**ApiKeySerializer(api_key).data, "key": text})


class ApiKeyRevokeView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.KEYS_MANAGE}

    @extend_schema(request=ApiKeyRevokeSerializer, responses=ApiKeySerializer)
    def post(self, request: Request, public_id: str) -> Response:
        """Revoke a key, and the keys that it made; they stop working within a second."""
        key_services.api_key_get(public_id=public_id)
        body = ApiKeyRevokeSerializer.parsed(request)
        api_key = key_services.api_key_revoke(
            public_id=public_id, with_children=body["children"], by=self.principal
        )
        return Response(ApiKeySerializer(api_key).data)


def _default_rules(principal: Principal) -> KeyRules:
    scopes = tuple(s for s in DEFAULT_SCOPES if s in principal.permissions)
    return inherited(principal, KeyRules(scopes=scopes))


def _rules(body: dict[str, Any], before: KeyRules) -> KeyRules:
    """Return the rules of a body; missing ones come from `before`."""
    return KeyRules(
        scopes=tuple(body.get("scopes", before.scopes)),
        allowed_models=tuple(body.get("allowed_models", before.allowed_models)),
        allowed_ips=tuple(body.get("allowed_ips", before.allowed_ips)),
    )


def _owner(principal: Principal, account_id: Any) -> Membership | ServiceAccount | None:
    """Return a new key's owner: the named service account, else the caller's own."""
    if account_id is not None:
        try:
            return people.service_account_get(account_id=account_id)
        except NotFound as error:
            error.param = "service_account"
            raise
    if principal.api_key is not None:
        return principal.api_key.owner or principal.api_key.service_account
    return principal.membership
