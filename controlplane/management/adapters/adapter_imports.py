"""/api/v1/adapters/{name}/import: versions whose files are fetched from elsewhere."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import imports
from controlplane.adapters.import_sources import MAX_URL_CHARS
from controlplane.management.adapters.adapters import VersionSerializer
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.tenants.auth import Permission


class VersionImportSerializer(StrictSerializer):
    repository = serializers.CharField(
        required=False, max_length=200, help_text="Of the operator's Hub, as `owner/name`."
    )
    revision = serializers.CharField(
        required=False, max_length=200, help_text="A branch, a tag or a commit; else `main`."
    )
    token = serializers.CharField(
        required=False,
        max_length=500,
        write_only=True,
        help_text="For a private or gated repository. It is sent only to the Hub, and deleted "
        "when the files are fetched.",
    )
    config_url = serializers.CharField(
        required=False,
        max_length=MAX_URL_CHARS,
        write_only=True,
        help_text="Instead of a repository: an https address of adapter_config.json, such as a "
        "presigned one of S3.",
    )
    tensors_url = serializers.CharField(
        required=False,
        max_length=MAX_URL_CHARS,
        write_only=True,
        help_text="The same for adapter_model.safetensors.",
    )
    base_model = serializers.CharField(
        required=False, help_text="For a new adapter when there are several base models."
    )
    accept_base_mismatch = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Do not reject it when its config names another base model.",
    )


class VersionImportView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=VersionImportSerializer, responses={201: VersionSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Make a version of files that the platform fetches from the Hub, or from two addresses.

        It is `uploading` until both files are here; then they are checked. `reasons` names any
        problem. If there is no adapter of this name, it is made.
        """
        body = VersionImportSerializer.parsed(request)
        accepts, base_model = body.pop("accept_base_mismatch"), body.pop("base_model", None)
        version = imports.adapter_version_import(
            name=name,
            source=imports.import_source(**body),
            base_model_name=base_model,
            created_by=self.principal.user,
            accepts_base_mismatch=accepts,
        )
        return Response(VersionSerializer(version).data, status=201)
