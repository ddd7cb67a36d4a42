"""The bodies of requests to /v1/batches, and of their answers."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from drf_spectacular.utils import extend_schema_field
from pydantic import AfterValidator, Field
from rest_framework import serializers

from controlplane.files.batches.lines import ENDPOINTS
from controlplane.files.batches.models import Batch, file_id
from controlplane.gateway.files.bodies import ExpiresAfter
from controlplane.gateway.rest.fields import Constant, PublicId, UnixTime
from controlplane.inference.bodies import Body
from controlplane.inference.schemas import Metadata


def _endpoint(value: str) -> str:
    if value not in ENDPOINTS:
        raise ValueError(f"must be one of {', '.join(ENDPOINTS)}")
    return value


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Annotated[str, AfterValidator(_endpoint)]
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: ExpiresAfter | None = None


class BatchFaultSerializer(serializers.Serializer[Any]):
    code = serializers.CharField()
    message = serializers.CharField()
    param = serializers.CharField(allow_null=True)
    line = serializers.IntegerField(allow_null=True, help_text="Of the file, from 1 on.")


class BatchFaultListSerializer(serializers.Serializer[Any]):
    object = Constant("list")
    data = BatchFaultSerializer(many=True)  # type: ignore[assignment]


class BatchRequestCountsSerializer(serializers.Serializer[Batch]):
    total = serializers.IntegerField(source="num_lines", min_value=0)
    completed = serializers.IntegerField(source="num_completed", min_value=0)
    failed = serializers.IntegerField(source="num_failed", min_value=0)


class BatchUsageSerializer(serializers.Serializer[Batch]):
    input_tokens = serializers.IntegerField(source="prompt_tokens", min_value=0)
    input_tokens_details = serializers.SerializerMethodField()
    output_tokens = serializers.IntegerField(source="completion_tokens", min_value=0)
    output_tokens_details = serializers.SerializerMethodField()
    total_tokens = serializers.SerializerMethodField()

    def get_input_tokens_details(self, batch: Batch) -> dict[str, int]:
        return {"cached_tokens": batch.cached_tokens}

    def get_output_tokens_details(self, batch: Batch) -> dict[str, int]:
        return {"reasoning_tokens": batch.thought_tokens}

    def get_total_tokens(self, batch: Batch) -> int:
        return batch.prompt_tokens + batch.completion_tokens


class _FileId(serializers.CharField):
    def to_representation(self, value: uuid.UUID) -> str:  # type: ignore[override]
        return str(file_id(value))


class BatchSerializer(serializers.Serializer[Batch]):
    """A batch, as OpenAI writes it."""

    id = PublicId(Batch.PREFIX)
    object = Constant("batch")
    endpoint = serializers.CharField()
    model = serializers.SerializerMethodField(help_text="The one model that all lines name.")
    errors = serializers.SerializerMethodField()  # type: ignore[assignment]
    input_file_id = _FileId()
    completion_window = Constant("24h")
    status = serializers.ChoiceField(Batch.Status.choices)
    output_file_id = _FileId(allow_null=True)
    error_file_id = _FileId(allow_null=True)
    created_at = UnixTime()
    expires_at = UnixTime()
    in_progress_at = UnixTime(allow_null=True)
    finalizing_at = UnixTime(allow_null=True)
    completed_at = UnixTime(allow_null=True)
    failed_at = UnixTime(allow_null=True)
    expired_at = UnixTime(allow_null=True)
    cancelling_at = UnixTime(allow_null=True)
    cancelled_at = UnixTime(allow_null=True)
    request_counts = BatchRequestCountsSerializer(source="*")
    usage = BatchUsageSerializer(source="*")
    metadata = serializers.DictField(child=serializers.CharField(), allow_null=True)

    def get_model(self, batch: Batch) -> str | None:
        return batch.model or None

    @extend_schema_field(BatchFaultListSerializer(allow_null=True))
    def get_errors(self, batch: Batch) -> Any:
        return {"object": "list", "data": batch.errors} if batch.errors else None
