"""The document of `PUT /ops/v1/tenants/{slug}`, and its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rest_framework import serializers

from controlplane.management.account.limits import QuotaSetSerializer, RatesSerializer
from controlplane.management.account.people import TenantSerializer
from controlplane.management.base import StrictSerializer
from controlplane.management.fields import ChoiceField
from controlplane.operator.provisioning import KEY_ROLES, Result
from controlplane.tenants.models import ApiKey
from controlplane.tenants.permissions import Permission
from controlplane.tenants.services import SETTABLE

#: Largest number of entries of each list.
MAX_KEYS, MAX_ADAPTERS, MAX_SCHEDULES = 100, 200, 200
_MAX_LISTED = 100
KEY_ROLE_CHOICES = [(role.value, role.label) for role in KEY_ROLES]


class OwnerSerializer(StrictSerializer):
    email = serializers.EmailField(
        max_length=254,
        help_text="Invited by mail as an owner, once; not if they are or were a member.",
    )


class DocumentKeySerializer(StrictSerializer):
    name = serializers.CharField(
        max_length=100, help_text="The name by which the same key is found again."
    )
    role = ChoiceField(KEY_ROLE_CHOICES, required=False, help_text="Instead of `scopes`.")
    scopes = serializers.ListField(
        child=ChoiceField([p.value for p in Permission]),
        required=False,
        allow_empty=False,
        max_length=_MAX_LISTED,
        help_text="At most a developer's scopes, which are the default.",
    )
    allowed_models = serializers.ListField(
        child=serializers.CharField(max_length=80), required=False, max_length=_MAX_LISTED
    )
    allowed_ips = serializers.ListField(
        child=serializers.CharField(max_length=50), required=False, max_length=_MAX_LISTED
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True)
    environment = ChoiceField(ApiKey.Environment.choices, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "role" in attrs and "scopes" in attrs:
            raise serializers.ValidationError({"role": "Give a role or scopes, not both."})
        return attrs


class DocumentAdapterSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63)
    base_model = serializers.CharField(
        required=False, max_length=63, help_text="Optional when there is only one base model."
    )


class DocumentScheduleSerializer(StrictSerializer):
    adapter = serializers.CharField(max_length=63)
    dataset = serializers.CharField(max_length=63)
    cron = serializers.CharField(max_length=100)
    timezone = serializers.CharField(required=False, max_length=64)
    hyperparameters = serializers.JSONField(required=False)
    is_paused = serializers.BooleanField(required=False)


def _list_of(serializer: Callable[..., Any], most: int) -> Any:
    return serializer(many=True, required=False, max_length=most)


class TenantDocumentSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200)
    status = ChoiceField([status.value for status in SETTABLE], required=False)
    owner = OwnerSerializer(required=False)
    keys = _list_of(DocumentKeySerializer, MAX_KEYS)
    limits = RatesSerializer(required=False, help_text="Limits of the whole tenant.")
    quota = QuotaSetSerializer(required=False)
    adapters = _list_of(DocumentAdapterSerializer, MAX_ADAPTERS)
    schedules = _list_of(DocumentScheduleSerializer, MAX_SCHEDULES)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        for part, field in (("keys", "name"), ("adapters", "name"), ("schedules", "adapter")):
            seen: set[str] = set()
            for index, entry in enumerate(attrs.get(part, ())):
                if entry[field] in seen:
                    path = f"{part}.{index}.{field}"
                    raise serializers.ValidationError(
                        {path: "This is in the list twice: remove one."}
                    )
                seen.add(entry[field])
        return attrs


class PartSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(
        help_text="The part of the document, as `keys[0]`; `tenant` for the tenant itself."
    )
    name = serializers.CharField()
    result = serializers.ChoiceField([result.value for result in Result])


class SecretSerializer(serializers.Serializer[Any]):
    """A new secret, shown only this time."""

    path = serializers.CharField()
    name = serializers.CharField()
    public_id = serializers.CharField(required=False, help_text="Of a key.")
    key = serializers.CharField(required=False, help_text="The key itself.")
    url = serializers.CharField(
        required=False, help_text="The address at which the owner accepts the invite."
    )


class ProvisionedSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="provisioned_tenant", read_only=True)
    dry_run = serializers.BooleanField(source="is_dry_run")
    tenant = TenantSerializer(
        allow_null=True, help_text="Null in a dry run if there is no such tenant."
    )
    parts = PartSerializer(many=True, help_text="The result of each part of the document.")
    secrets = SecretSerializer(many=True, help_text="New secrets. They are shown only once.")
