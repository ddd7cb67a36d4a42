"""/api/v1/audit-events: who changed what."""

from __future__ import annotations

import uuid
from typing import ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import require
from controlplane.events.audit.models import AuditEvent
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import TenantAPIView
from controlplane.tenants.auth import Permission

_FILTERS = {
    "action": "Only events of this action, as in api_key.revoked.",
    "actor_id": "Only events of this key (public id), person (id) or task.",
    "resource_id": "Only events of this resource.",
}


class AuditEventSerializer(serializers.ModelSerializer[AuditEvent]):
    object = serializers.CharField(default="audit_event", read_only=True)
    before = serializers.DictField(allow_null=True, help_text="The changed fields' old values.")
    after = serializers.DictField(allow_null=True, help_text="The changed fields' new values.")

    class Meta:
        model = AuditEvent
        fields = (
            "id", "object", "seq", "occurred_at", "actor_type", "actor_id", "actor_name",
            "action", "resource_type", "resource_id", "before", "after", "ip",
            "request_id", "prev_hash", "hash",
        )  # fmt: skip


class AuditEventsView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.AUDIT_READ}

    @extend_schema(
        "audit_events_list",
        [*PAGE_PARAMETERS, *(OpenApiParameter(n, str, description=d) for n, d in _FILTERS.items())],
        responses=page_of(AuditEventSerializer),
    )
    def get(self, request: Request) -> Response:
        """List all changes in the tenant, newest first. Nobody can alter the list."""
        rows = AuditEvent.objects.all()
        for name in _FILTERS:
            wanted = request.query_params.get(name)
            if wanted is not None:
                rows = rows.filter(**{name: wanted}) if "\0" not in wanted else rows.none()
        return page(request, rows, AuditEventSerializer)


class AuditEventView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.AUDIT_READ}

    @extend_schema(responses=AuditEventSerializer)
    def get(self, request: Request, event_id: uuid.UUID) -> Response:
        event = require(AuditEvent.objects.filter(pk=event_id).first(), "There is no such event.")
        return Response(AuditEventSerializer(event).data)
