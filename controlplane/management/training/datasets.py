"""/api/v1/datasets/{name}/report, /preview, /versions and /restore: the contents of datasets."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.gateway.fine_tuning.dataset_files import dataset_from_file
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, Paging, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.training.training import DatasetSerializer
from controlplane.tenants.auth import Permission, authorize
from controlplane.training.datasets import preview, reports, versions
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import DatasetVersion

_PREVIEW = Paging(default_limit=10, max_limit=preview.MAX_PREVIEW)
_LIMIT = OpenApiParameter(
    "limit", int, description=f"Largest number of rows, 1 to {preview.MAX_PREVIEW}; default 10."
)


class FindingsSerializer(serializers.Serializer[Any]):
    count = serializers.IntegerField()
    lines = serializers.ListField(
        child=serializers.JSONField(), help_text="The first ones: [line, what was found there]."
    )


class BaseCountsSerializer(serializers.Serializer[Any]):
    context_length = serializers.IntegerField()
    tokens = serializers.IntegerField(help_text="Tokens of each row's longest example, summed.")
    learned_tokens = serializers.IntegerField()
    mean = serializers.FloatField(help_text="Tokens of a row; so are median, p95, max.")
    median = serializers.IntegerField()
    p95 = serializers.IntegerField()
    max = serializers.IntegerField()
    longer_than_context = FindingsSerializer(help_text="lines: [line, tokens].")
    refused = FindingsSerializer(help_text="By the chat template; lines: [line, why].")
    tokens_per_s = serializers.FloatField(
        allow_null=True, help_text="Speed of recent runs on this base; null: there were none."
    )
    epoch_s = serializers.FloatField(
        allow_null=True, help_text="Time of one pass over the rows at that speed."
    )


class AddedSerializer(serializers.Serializer[Any]):
    num_rows = serializers.IntegerField()
    duplicates = FindingsSerializer(
        help_text="Added rows that an earlier version has: [line, its first line]."
    )


class ArgumentsSerializer(serializers.Serializer[Any]):
    unwrapped = FindingsSerializer(
        help_text="Objects that were encoded as JSON twice, and are learned as objects: "
        "[line, place]."
    )
    invalid = FindingsSerializer(
        help_text="Those that break the schema of their tool: [line, the call, and where in it]."
    )
    num_unchecked = serializers.IntegerField(
        help_text="Calls that were not checked, because their rows were not counted or time was up."
    )


class DatasetReportSerializer(serializers.Serializer[Any]):
    object = serializers.CharField()
    dataset = serializers.CharField()
    version = serializers.IntegerField()
    sha256 = serializers.CharField()
    status = serializers.ChoiceField(choices=["pending", "ready", "failed"])
    num_rows = serializers.IntegerField()
    num_bytes = serializers.IntegerField()
    duplicates = FindingsSerializer(allow_null=True, help_text="lines: [line, its first line].")
    added = AddedSerializer(
        allow_null=True, help_text="Rows that the version before does not have."
    )
    arguments = ArgumentsSerializer(
        allow_null=True, help_text="Counts of the learned calls; null: an old report."
    )
    counted_every = serializers.IntegerField(
        help_text="1: the tokens of all rows were counted. n: only those of every n-th row, and "
        "`tokens` and `learned_tokens` are estimates."
    )
    bases = serializers.DictField(
        child=BaseCountsSerializer(), help_text="By the base model's name."
    )
    error = serializers.CharField(help_text="The error of a failed report.")
    made_at = serializers.DateTimeField(allow_null=True)


class PreviewRowSerializer(serializers.Serializer[Any]):
    line = serializers.IntegerField()
    row = serializers.JSONField()


class PreviewSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="list")
    data = PreviewRowSerializer(many=True)  # type: ignore[assignment]


class DatasetVersionSerializer(serializers.ModelSerializer[DatasetVersion]):
    object = serializers.CharField(default="dataset_version", read_only=True)
    is_stored = serializers.BooleanField(
        help_text="false: its rows were replaced, and can neither be trained on nor restored."
    )

    class Meta:
        model = DatasetVersion
        fields = (
            "id", "object", "number", "kind", "sha256", "num_bytes", "num_rows", "added_rows",
            "is_stored", "created_at",
        )  # fmt: skip


class DatasetVersionCreateSerializer(StrictSerializer):
    file = serializers.CharField(
        max_length=100,
        help_text="A file of /v1/files with purpose `fine-tune`; not needed afterwards.",
    )
    append = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Append the rows, instead of replacing the present ones.",
    )


class RestoreSerializer(StrictSerializer):
    version = serializers.IntegerField(min_value=1, max_value=2**31 - 1)


class DatasetVersionsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema(
        "dataset_versions_list", PAGE_PARAMETERS, responses=page_of(DatasetVersionSerializer)
    )
    def get(self, request: Request, name: str) -> Response:
        """List the dataset's versions, newest first."""
        rows = dataset_services.dataset_get(name=name).versions.all()
        return page(request, rows, DatasetVersionSerializer)

    @extend_schema(request=DatasetVersionCreateSerializer, responses={201: DatasetSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Make an uploaded file's rows the next version of the dataset; make it if there is none.

        This is for more rows than fit into one request: up to 2 GiB, uploaded by /v1/uploads.
        """
        body = DatasetVersionCreateSerializer.parsed(request)
        authorize(self.principal, Permission.FILES_READ)  # because it reads a file
        dataset = dataset_from_file(name=name, file_id=body["file"], appends=body["append"])
        return Response(DatasetSerializer(dataset).data, status=201)


class DatasetRestoreView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema(request=RestoreSerializer, responses=DatasetSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Make an earlier version's rows current again, as the next version."""
        body = RestoreSerializer.parsed(request)
        dataset = dataset_services.dataset_get(name=name)
        restored = versions.version_restore(dataset=dataset, number=body["version"])
        return Response(DatasetSerializer(restored).data)


class DatasetReportView(TenantAPIView):
    @extend_schema(responses=DatasetReportSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the counts of the rows of a dataset, or of its version `name@n`.

        It is `pending` until they are counted. For captured rows `lines` are empty without
        requests:content: they may quote a row.
        """
        return Response(
            reports.report_of(*dataset_services.dataset_version_get(name), by=self.principal)
        )


class DatasetPreviewView(TenantAPIView):
    #: Rows are what clients said: only people who may replace them read them.
    permissions: ClassVar = {"GET": Permission.TRAINING_WRITE}

    @extend_schema(parameters=[_LIMIT], responses=PreviewSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the dataset's first rows; fewer if they are long.

        Rows that were captured need requests:content, too.
        """
        limit = _PREVIEW.limit(request)
        rows = preview.rows_preview(
            dataset_services.dataset_get(name=name), limit, by=self.principal
        )
        return Response({"object": "list", "data": rows})
