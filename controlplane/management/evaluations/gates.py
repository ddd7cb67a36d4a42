"""/api/v1/adapters/{name}/versions/{number}/gate."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.services import adapter_version_get
from controlplane.errors import require
from controlplane.evaluations import gate
from controlplane.evaluations.models import GateDecision
from controlplane.management.base import TenantAPIView
from controlplane.tenants.auth import Permission


class GateSerializer(serializers.ModelSerializer[GateDecision]):
    object = serializers.CharField(default="gate_decision", read_only=True)
    adapter = serializers.CharField(source="version.adapter.name")
    version = serializers.IntegerField(source="version.number")
    live_version = serializers.IntegerField(
        source="live_number",
        allow_null=True,
        help_text="The number of the live version in the comparison.",
    )
    suite = serializers.CharField(source="suite_version.suite.name", default=None, allow_null=True)
    suite_version = serializers.IntegerField(
        source="suite_version.number", default=None, allow_null=True
    )
    status = serializers.CharField(help_text="`waiting`, `promote`, `hold` or `reject`.")
    outcome = serializers.CharField(help_text="`promoted`, `canary` or `held`; empty: it waits.")
    policy = serializers.DictField(help_text="The adapter's `gate` at its start.")
    reasons = serializers.ListField(child=serializers.CharField())
    findings = serializers.ListField(
        child=serializers.DictField(),
        help_text="By metric and slice: the mean difference, its bounds, the smallest "
        "detectable drop, and the drop that matters.",
    )
    habits = serializers.DictField(
        help_text="`before`, of the live version, and `after`: mean `length` of the answers in "
        "characters, shares of `refusals`, `repeated` text and `invalid` by schema; `num` answers."
    )
    candidate = serializers.UUIDField(source="candidate_id", allow_null=True)
    live = serializers.UUIDField(source="live_id", allow_null=True)

    class Meta:
        model = GateDecision
        fields = (
            "id", "object", "adapter", "version", "live_version", "suite", "suite_version",
            "status", "outcome", "reasons", "findings", "habits", "num_leaked", "policy",
            "candidate", "live", "created_at", "decided_at",
        )  # fmt: skip


class VersionGateView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema("version_gate", responses=GateSerializer)
    def get(self, request: Request, name: str, number: int) -> Response:
        """Return the gate's findings and decision on a version. 404 if there was no gate."""
        version = adapter_version_get(name=name, number=number)
        rows = GateDecision.objects.allowed().filter(version=version)
        found = rows.select_related("version__adapter", "suite_version__suite").first()
        found = require(found, "No gate compared this version.")
        return Response(GateSerializer(found).data)

    @extend_schema(request=None, responses={202: GateSerializer})
    def post(self, request: Request, name: str, number: int) -> Response:
        """Compare a ready version with the live one by the adapter's `gate`, even if it was before.

        The decision is applied as if a training had just made the version.
        """
        version = adapter_version_get(name=name, number=number)
        return Response(GateSerializer(gate.gate_begin(version=version)).data, status=202)
