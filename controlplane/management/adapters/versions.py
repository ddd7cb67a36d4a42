"""/api/v1/adapters/{name}/versions/{n}/…: a version's states, files and differences."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import downloads, retirement, services
from controlplane.errors import InvalidRequest
from controlplane.gateway.rest.fields import Constant
from controlplane.management.adapters.adapters import VersionSerializer
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.tenants.auth import Permission
from controlplane.training.runs import comparison


class DeprecateSerializer(StrictSerializer):
    shutdown_date = serializers.DateField(
        required=False,
        default=None,
        allow_null=True,
        help_text="From this day (UTC) requests for the version are refused, and then it is "
        "retired; null: no such day.",
    )


class DownloadFileSerializer(serializers.Serializer[Any]):
    url = serializers.URLField(help_text="A URL for a GET without a key.")
    num_bytes = serializers.IntegerField()


class DownloadSerializer(serializers.Serializer[downloads.Download]):
    object = Constant("adapter_version.download")
    files = serializers.DictField(child=DownloadFileSerializer())
    expires_at = serializers.DateTimeField()


class ChangeSerializer(serializers.Serializer[comparison.Change]):
    area = serializers.ChoiceField(
        ["config", "files", "provenance", "hyperparameters", "metrics"],
        help_text="`config`: adapter_config.json; `files`: facts from the check; `metrics`: the "
        "last progress of the run that trained it.",
    )
    field = serializers.CharField()  # type: ignore[assignment]
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)


class DiffSerializer(serializers.Serializer[comparison.Comparison]):
    object = Constant("adapter_version.diff")
    adapter = serializers.CharField(source="after.version.adapter.name")
    before = serializers.IntegerField(source="before.version.number")
    after = serializers.IntegerField(source="after.version.number")
    changes = ChangeSerializer(many=True)


class _LifeView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}


class VersionDeprecateView(_LifeView):
    @extend_schema(request=DeprecateSerializer, responses=VersionSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Mark a ready version as deprecated, and set or clear its last day.

        It answers as before, with the headers `Deprecation` and, with a date, `Sunset`. From that
        day on (UTC) requests for it get 404; if it is live, those for the adapter's name, too,
        until the sweep retires it and the version before it is live again.
        """
        body = DeprecateSerializer.parsed(request)
        version = services.adapter_version_get(name=name, number=number)
        version = retirement.version_deprecate(version=version, shutdown_date=body["shutdown_date"])
        return Response(VersionSerializer(version).data)


class VersionUndeprecateView(_LifeView):
    @extend_schema(request=None, responses=VersionSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Take back a deprecation, with its date."""
        version = services.adapter_version_get(name=name, number=number)
        return Response(VersionSerializer(retirement.version_undeprecate(version=version)).data)


class VersionRetireView(_LifeView):
    @extend_schema(request=None, responses=VersionSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Refuse new requests for the version from now on; running ones finish.

        Until `files_until` it can be taken back with `unretire`.
        """
        version = services.adapter_version_get(name=name, number=number)
        return Response(VersionSerializer(retirement.version_retire(version=version)).data)


class VersionUnretireView(_LifeView):
    @extend_schema(request=None, responses=VersionSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Make a retired version ready again; it does not become live.

        409 `files_removed` after `files_until`.
        """
        version = services.adapter_version_get(name=name, number=number)
        return Response(VersionSerializer(retirement.version_unretire(version=version)).data)


class VersionDownloadView(_LifeView):
    @extend_schema(request=None, responses=DownloadSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Return URLs of the version's two files, which work for some minutes without a key.

        The audit trail records who asked.
        """
        version = services.adapter_version_get(name=name, number=number)
        return Response(DownloadSerializer(downloads.version_download(version=version)).data)


class VersionDiffView(TenantAPIView):
    @extend_schema(
        parameters=[
            OpenApiParameter(
                "with", int, required=True, description="The number of the version before."
            )
        ],
        responses=DiffSerializer,
    )
    def get(self, request: Request, name: str, number: int) -> Response:
        """List the differences from another version: config, files, provenance, training."""
        after = services.adapter_version_get(name=name, number=number)
        other = request.query_params.get("with", "")
        if not (other.isascii() and other.isdigit() and len(other) <= 10):
            raise InvalidRequest("with must be the number of a version.", param="with")
        before = services.adapter_version_get(name=name, number=int(other))
        return Response(DiffSerializer(comparison.versions_compare(before, after)).data)
