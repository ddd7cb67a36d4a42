"""/api/v1/adapters/{name}/versions/{number}/upload and /parts: multipart uploads."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import services, uploads
from controlplane.deletion import services as deletion
from controlplane.errors import InvalidRequest
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.tenants.auth import Permission


class AdapterPartSerializer(serializers.Serializer[dict[str, Any]]):
    number = serializers.IntegerField()
    num_bytes = serializers.IntegerField()
    sha256 = serializers.CharField(help_text="As the client stated it.")
    is_uploaded = serializers.BooleanField(help_text="Whether the store has it.")


class AdapterUploadFileSerializer(serializers.Serializer[dict[str, Any]]):
    num_bytes = serializers.IntegerField()
    part_bytes = serializers.IntegerField(help_text="The length of each part but the last.")
    num_parts = serializers.IntegerField()
    parts = AdapterPartSerializer(many=True, help_text="The stated parts.")


class AdapterUploadSerializer(serializers.Serializer[dict[str, Any]]):
    object = serializers.CharField(default="adapter_upload")
    adapter = serializers.CharField()
    number = serializers.IntegerField()
    status = serializers.CharField()
    expires_at = serializers.DateTimeField(
        help_text="A version that is not completed by then is rejected."
    )
    files = serializers.DictField(child=AdapterUploadFileSerializer())


class AdapterPartsSerializer(StrictSerializer):
    file = serializers.CharField(max_length=32)
    parts = serializers.DictField(
        child=serializers.CharField(max_length=64),
        help_text="By the part's number: the SHA-256 of its bytes, 64 hexadecimal digits.",
    )


class SignedAdapterPartSerializer(serializers.Serializer[dict[str, Any]]):
    number = serializers.IntegerField()
    url = serializers.URLField()
    method = serializers.ChoiceField(["PUT"])
    headers = serializers.DictField(child=serializers.CharField())


class SignedAdapterPartsSerializer(serializers.Serializer[dict[str, Any]]):
    object = serializers.CharField(default="list")
    data = SignedAdapterPartSerializer(many=True)  # type: ignore[assignment]


class VersionUploadView(TenantAPIView):
    permissions: ClassVar = {"DELETE": Permission.ADAPTERS_WRITE}

    @extend_schema(responses=AdapterUploadSerializer)
    def get(self, request: Request, name: str, number: int) -> Response:
        """Return the parts that the store has, to continue after an interruption.

        Files that do not come by parts, or have been checked, are not named.
        """
        version = services.adapter_version_get(name=name, number=number)
        return Response(AdapterUploadSerializer(uploads.upload_state(version)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str, number: int) -> Response:
        """Abort the upload and delete its version. 409 `upload_ended` when it is complete."""
        version = services.adapter_version_get(name=name, number=number)
        uploads.check_open(version)
        deletion.version_delete(version=version)
        return Response(status=204)


class VersionPartsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=AdapterPartsSerializer, responses=SignedAdapterPartsSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Return a URL for each part: PUT exactly its bytes there, with the headers, in 15 minutes.

        Up to 100 parts in one call, in any order. All parts have the length `part_bytes`, but the
        last of a file. A part can be sent again, with the same bytes.
        """
        version = services.adapter_version_get(name=name, number=number)
        body = AdapterPartsSerializer.parsed(request)
        if not 1 <= len(body["parts"]) <= uploads.MAX_SIGNED:
            raise InvalidRequest(f"Name 1 to {uploads.MAX_SIGNED} parts.", param="parts")
        signed = uploads.parts_sign(version=version, file=body["file"], digests=body["parts"])
        return Response({"object": "list", "data": signed})
