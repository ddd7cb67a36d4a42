"""/api/v1/webhooks."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.events.outbox.models import CHOOSABLE
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.tenants.auth import Permission
from controlplane.webhooks import services
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint

_TYPES_HELP = f"Of: {', '.join(CHOOSABLE)}."
_URL_HELP = (
    "https, port 443 or 8443, a public host. The operator can allow others; redirects are not "
    "followed."
)
_SECRET_HELP = "Signs the events, as Standard Webhooks says. It is shown only this time."
_ALL = dict.fromkeys(("GET", "POST", "PATCH", "DELETE"), Permission.WEBHOOKS_MANAGE)


class WebhookSerializer(serializers.ModelSerializer[WebhookEndpoint]):
    object = serializers.CharField(default="webhook", read_only=True)
    event_types = serializers.ListField(child=serializers.CharField(), help_text=_TYPES_HELP)
    disabled_reason = serializers.CharField(
        help_text="The reason why the platform disabled it; empty: it did not."
    )
    failing_since = serializers.DateTimeField(
        allow_null=True,
        help_text="Time since which every attempt failed; null: the last one did not.",
    )
    old_secret_until = serializers.DateTimeField(
        allow_null=True, help_text="Until when the secret before the last rotation also signs."
    )

    class Meta:
        model = WebhookEndpoint
        fields = (
            "id", "object", "url", "description", "event_types", "is_enabled",
            "disabled_reason", "failing_since", "old_secret_until", "created_at",
        )  # fmt: skip


class WebhookCreatedSerializer(WebhookSerializer):
    secret = serializers.CharField(help_text=_SECRET_HELP)

    class Meta(WebhookSerializer.Meta):
        fields = (*WebhookSerializer.Meta.fields, "secret")  # type: ignore[assignment]


class WebhookCreateSerializer(StrictSerializer):
    url = serializers.CharField(max_length=2000, help_text=_URL_HELP)
    event_types = serializers.ListField(
        child=serializers.CharField(max_length=32), max_length=32, help_text=_TYPES_HELP
    )
    description = serializers.CharField(
        max_length=services.MAX_DESCRIPTION_CHARS, required=False, default="", allow_blank=True
    )


class WebhookUpdateSerializer(StrictSerializer):
    url = serializers.CharField(max_length=2000, required=False, help_text=_URL_HELP)
    event_types = serializers.ListField(
        child=serializers.CharField(max_length=32),
        max_length=32,
        required=False,
        help_text=_TYPES_HELP,
    )
    description = serializers.CharField(
        max_length=services.MAX_DESCRIPTION_CHARS, required=False, allow_blank=True
    )
    is_enabled = serializers.BooleanField(
        required=False, help_text="Disabling cancels waiting deliveries."
    )


class WebhookRotateSerializer(StrictSerializer):
    overlap_s = serializers.IntegerField(
        required=False,
        default=int(services.DEFAULT_OVERLAP.total_seconds()),
        min_value=0,
        max_value=int(services.MAX_OVERLAP.total_seconds()),
        help_text="Seconds for which each event is signed with both secrets.",
    )


class WebhookDeliverySerializer(serializers.ModelSerializer[WebhookDelivery]):
    object = serializers.CharField(default="webhook_delivery", read_only=True)
    event = serializers.CharField(
        source="event.public_id", help_text="The event's id, sent as `webhook-id`."
    )
    event_type = serializers.CharField(source="event.type")
    attempts = serializers.IntegerField(
        help_text="Attempts since it was made, or last redelivered."
    )
    response_status = serializers.IntegerField(
        allow_null=True, help_text="Status of the last attempt's answer; null: there was none."
    )
    error = serializers.CharField(
        help_text="The reason why the last attempt failed; empty: it did not."
    )

    class Meta:
        model = WebhookDelivery
        fields = (
            "id", "object", "event", "event_type", "status", "attempts", "attempted_at",
            "next_attempt_at", "response_status", "error", "took_ms", "created_at",
        )  # fmt: skip


class WebhooksView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema("webhooks_list", PAGE_PARAMETERS, responses=page_of(WebhookSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's webhooks, newest first."""
        return page(request, WebhookEndpoint.objects.all(), WebhookSerializer)

    @extend_schema(request=WebhookCreateSerializer, responses={201: WebhookCreatedSerializer})
    def post(self, request: Request) -> Response:
        """Make a webhook. Only this answer has its secret."""
        made, secret = services.webhook_create(**WebhookCreateSerializer.parsed(request))
        return Response(_with_secret(made, secret), status=201)


class WebhookView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema("webhooks_retrieve", responses=WebhookSerializer)
    def get(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """Return a webhook."""
        return Response(WebhookSerializer(services.webhook_get(webhook_id=webhook_id)).data)

    @extend_schema(request=WebhookUpdateSerializer, responses=WebhookSerializer)
    def patch(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """Change a webhook, enable or disable it. The secret stays."""
        changes = WebhookUpdateSerializer.parsed(request)
        changed = services.webhook_update(webhook_id=webhook_id, changes=changes)
        return Response(WebhookSerializer(changed).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """Delete a webhook with its deliveries."""
        services.webhook_delete(webhook_id=webhook_id)
        return Response(status=204)


class WebhookRotateView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema(request=WebhookRotateSerializer, responses=WebhookCreatedSerializer)
    def post(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """Replace the secret. For a while each event has the signatures of both."""
        overlap = dt.timedelta(seconds=WebhookRotateSerializer.parsed(request)["overlap_s"])
        changed, secret = services.webhook_rotate(webhook_id=webhook_id, overlap=overlap)
        return Response(_with_secret(changed, secret))


class WebhookTestView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema(request=None, responses={202: WebhookDeliverySerializer})
    def post(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """Send the event `webhook.test` to this webhook."""
        delivery = services.webhook_test(webhook_id=webhook_id)
        return Response(WebhookDeliverySerializer(delivery).data, status=202)


class WebhookDeliveriesView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema(
        "webhook_deliveries_list", PAGE_PARAMETERS, responses=page_of(WebhookDeliverySerializer)
    )
    def get(self, request: Request, webhook_id: uuid.UUID) -> Response:
        """List a webhook's deliveries of the last 30 days, newest first."""
        endpoint = services.webhook_get(webhook_id=webhook_id)
        rows = WebhookDelivery.objects.filter(endpoint=endpoint).select_related("event")
        return page(request, rows, WebhookDeliverySerializer)


class WebhookRedeliverView(TenantAPIView):
    permissions: ClassVar = _ALL

    @extend_schema(request=None, responses={202: WebhookDeliverySerializer})
    def post(self, request: Request, webhook_id: uuid.UUID, delivery_id: uuid.UUID) -> Response:
        """Deliver an event again, with the same id."""
        delivery = services.delivery_redeliver(webhook_id=webhook_id, delivery_id=delivery_id)
        return Response(WebhookDeliverySerializer(delivery).data, status=202)


def _with_secret(endpoint: WebhookEndpoint, secret: str) -> dict[str, Any]:
    return {**WebhookSerializer(endpoint).data, "secret": secret}
