"""/api/v1/schemas/lint."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.schemas import BadSchema, Status, plan
from controlplane.tenants.auth import Permission


class LintSerializer(StrictSerializer):
    schema = serializers.DictField(
        help_text="A JSON Schema (2020-12), as in `response_format.json_schema.schema`."
    )


class FindingSerializer(serializers.Serializer[Any]):
    path = serializers.CharField(help_text="The keyword's place, as a JSON pointer.")
    keyword = serializers.CharField()
    status = serializers.ChoiceField(
        [status.value for status in Status],
        help_text=(
            "`enforced`: tokens that would violate it are never chosen; `checked`: the finished "
            "answer is checked against it; `unsupported`: it is ignored; `annotation`: it requires "
            "nothing."
        ),
    )
    reason = serializers.CharField(allow_blank=True)


class SchemaReportSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="schema_report")
    strict_ok = serializers.BooleanField(
        help_text="Whether `strict: true` is accepted: each keyword is enforced or an annotation."
    )
    findings = FindingSerializer(many=True)


class LintView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.READ}

    @extend_schema(
        operation_id="schemas_lint",
        summary="Report for every keyword of a schema whether it is enforced.",
        request=LintSerializer,
        responses=SchemaReportSerializer,
    )
    def post(self, request: Request) -> Response:
        schema = LintSerializer.parsed(request)["schema"]
        try:
            made = plan(schema)
        except BadSchema as error:
            raise InvalidRequest(
                f"'schema' {error}.", param="schema", code="invalid_schema"
            ) from error
        return Response(
            {
                "object": "schema_report",
                "strict_ok": made.is_enforced,
                "findings": [finding.to_dict() for finding in made.findings],
            }
        )
