"""/api/v1/datasets/{name}/source: the source from which a dataset's rows are pulled."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.tenants.auth import Permission, authorize
from controlplane.training.datasets import sources
from controlplane.training.models import DatasetPull, DatasetSource

#: Kind -> the fields of its place with their defaults; None: the field is required.
_PLACE: dict[str, dict[str, str | None]] = {
    "s3": {"endpoint": None, "region": "us-east-1", "bucket": None, "prefix": ""},
    "hub": {"repository": None, "revision": "main", "prefix": ""},
    "captured": {"only": "good", "model": ""},
}
_SECRETS = {
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "hub": ("token",),
    "captured": (),
}


class DatasetPullSerializer(serializers.ModelSerializer[DatasetPull]):
    object = serializers.CharField(default="dataset_pull", read_only=True)
    version = serializers.IntegerField(allow_null=True, help_text="The version that it made.")

    class Meta:
        model = DatasetPull
        fields = (
            "id", "object", "status", "version", "added_rows", "error",
            "created_at", "finished_at",
        )  # fmt: skip


class DatasetSourceSerializer(serializers.ModelSerializer[DatasetSource]):
    object = serializers.CharField(default="dataset_source", read_only=True)
    dataset = serializers.CharField(source="name")
    place = serializers.DictField(
        child=serializers.CharField(),
        help_text="endpoint, region, bucket, prefix of s3; repository, revision, prefix of hub; "
        "only, model of captured.",
    )
    is_pulling = serializers.SerializerMethodField(help_text="A pull is due, or under way.")
    last_pull = serializers.SerializerMethodField()

    def get_is_pulling(self, source: DatasetSource) -> bool:
        return sources.is_pulling(source=source)

    @extend_schema_field(DatasetPullSerializer(allow_null=True))
    def get_last_pull(self, source: DatasetSource) -> Any:
        found = sources.last_pull(source)
        return None if found is None else DatasetPullSerializer(found).data

    class Meta:
        model = DatasetSource
        fields = (
            "id", "object", "dataset", "kind", "place", "cron", "timezone", "next_pull_at",
            "is_pulling", "last_pull", "created_at",
        )  # fmt: skip


class DatasetSourceSetSerializer(StrictSerializer):
    kind = ChoiceField(["s3", "hub", "captured"])
    endpoint = serializers.CharField(
        required=False, max_length=300, help_text="Of s3: https://s3.eu-central-1.amazonaws.com"
    )
    region = serializers.CharField(required=False, max_length=40, help_text="Else `us-east-1`.")
    bucket = serializers.CharField(required=False, max_length=63)
    repository = serializers.CharField(
        required=False, max_length=200, help_text="A dataset of the operator's Hub: `owner/name`."
    )
    revision = serializers.CharField(
        required=False, max_length=200, help_text="A branch, a tag or a commit; else `main`."
    )
    prefix = serializers.CharField(
        required=False,
        max_length=1000,
        allow_blank=True,
        help_text="An object's key, or the beginning of keys that end in .jsonl.",
    )
    only = serializers.CharField(
        required=False,
        max_length=16,
        help_text="For captured requests: all, corrected; else `good`, or corrected.",
    )
    model = serializers.CharField(
        required=False,
        max_length=200,
        help_text="For captured requests: the model as they named it.",
    )
    access_key_id = serializers.CharField(required=False, max_length=2000, write_only=True)
    secret_access_key = serializers.CharField(required=False, max_length=2000, write_only=True)
    session_token = serializers.CharField(required=False, max_length=2000, write_only=True)
    token = serializers.CharField(
        required=False, max_length=500, write_only=True, help_text="For a private dataset of a Hub."
    )
    cron = serializers.CharField(
        required=False,
        max_length=100,
        allow_blank=True,
        help_text="The times of pulls; empty: only on request. Left out: it stays as it is.",
    )
    timezone = serializers.CharField(
        required=False, max_length=64, help_text="At first UTC. Left out: it stays as it is."
    )


def _divided(body: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the place and the secrets of a body. Raises InvalidRequest."""
    kind = body["kind"]
    place: dict[str, str] = {}
    for name, default in _PLACE[kind].items():
        value = body.get(name, default)
        if value is None:
            raise InvalidRequest(f"A source of {kind} needs this field.", param=name)
        place[name] = value
    secrets = {name: body[name] for name in _SECRETS[kind] if name in body}
    known = {"kind", "cron", "timezone", *place, *secrets}
    for name in body:
        if name not in known:
            raise InvalidRequest(f"A source of {kind} has no such field: remove it.", param=name)
    return place, secrets


class DatasetSourceView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PUT", "DELETE"), Permission.TRAINING_WRITE)

    @extend_schema(responses=DatasetSourceSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the source of the dataset's rows, without credentials."""
        return Response(DatasetSourceSerializer(sources.source_get(name=name)).data)

    @extend_schema(request=DatasetSourceSetSerializer, responses=DatasetSourceSerializer)
    def put(self, request: Request, name: str) -> Response:
        """Set the source of rows: a bucket of S3, a dataset of the Hub, captured requests.

        The dataset need not exist. Credentials are stored encrypted, and never shown; those of the
        Hub stay if they are left out and the place is the same. Captured requests need
        requests:content, too.
        """
        body = DatasetSourceSetSerializer.parsed(request)
        if body["kind"] == DatasetSource.Kind.CAPTURED:
            authorize(self.principal, Permission.REQUESTS_CONTENT)
        place, secrets = _divided(body)
        source = sources.source_set(
            name=name,
            kind=body["kind"],
            place=place,
            secrets=secrets,
            cron_line=body.get("cron"),
            timezone_name=body.get("timezone"),
        )
        return Response(DatasetSourceSerializer(source).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the source with its history; pulled rows stay."""
        sources.source_delete(source=sources.source_get(name=name))
        return Response(status=204)


class DatasetPullsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema("dataset_pulls_list", PAGE_PARAMETERS, responses=page_of(DatasetPullSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the pulls, newest first; 50 are kept."""
        rows = sources.source_get(name=name).pulls.all()
        return page(request, rows, DatasetPullSerializer)

    @extend_schema(request=None, responses={202: DatasetSourceSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Pull now: new rows become a version; without new rows there is none."""
        source = sources.source_get(name=name)
        sources.pull_request(source=source)
        return Response(DatasetSourceSerializer(source).data, status=202)
