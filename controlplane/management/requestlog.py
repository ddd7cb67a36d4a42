"""/api/v1/requests: the request log, with content only where the tenant stores it."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from django.db.models import Exists, OuterRef, QuerySet
from django.utils.dateparse import parse_datetime
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest, from_worker
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.requestlog import services
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import LogPolicy, RefusalHour, RequestContent
from controlplane.requestlog.services import MAX_CONTENT_DAYS, MAX_METADATA_DAYS, StoredWords
from controlplane.tenants.auth import Permission

_CONTENT_HELP = (
    "off: no prompt or answer is stored, and stored ones become unreadable at once. on_request: "
    "those of requests with `store: true` are stored. all: those of all requests except with "
    "`store: false`."
)
#: The status for a client that disconnected before the answer's end, as in other servers.
CLIENT_LEFT = 499


class InferenceRequestSerializer(serializers.ModelSerializer[InferenceRequest]):
    object = serializers.CharField(default="request", read_only=True)
    id = serializers.CharField(
        source="request_id", help_text="The id in the response header x-request-id."
    )
    cursor = serializers.UUIDField(source="pk")
    status = serializers.SerializerMethodField(
        help_text="The final HTTP status; 499 when the client disconnected."
    )
    digests = serializers.ListField(
        child=serializers.CharField(), help_text="Digests of the adapters that answered."
    )
    weights = serializers.ListField(
        child=serializers.FloatField(),
        allow_null=True,
        help_text="The weight of each digest in a blend.",
    )
    sampling = serializers.DictField(
        allow_null=True,
        help_text="Sampling parameters that differ from the defaults: temperature, max_tokens, "
        "seed, …; never stop strings or biases.",
    )
    drafts = serializers.DictField(
        child=serializers.IntegerField(),
        allow_null=True,
        help_text="Drafted tokens: accepted ones by source, and `rejected`. Null: there were none.",
    )
    has_content = serializers.BooleanField(
        default=False, help_text="Whether its prompt and answers are stored: see `/content`."
    )

    class Meta:
        model = InferenceRequest
        fields = (
            "id", "object", "cursor", "endpoint", "model", "base_model", "adapter_version_id",
            "alias_revision_id", "alias_target",
            "digests", "weights", "sampling", "attempts", "api_key_id", "stream", "is_batch",
            "status", "finish_reason",
            "error_code", "accepted_at", "queue_ms", "load_ms", "first_token_ms", "total_ms",
            "tier",
            "prompt_tokens", "cached_tokens", "completion_tokens", "drafts", "has_content",
        )  # fmt: skip

    def get_status(self, row: InferenceRequest) -> int:
        if row.error_code:
            return from_worker(row.error_code, "").status
        return CLIENT_LEFT if row.finish_reason == "cancelled" else 200


def _text(name: str, value: str) -> str:
    return value


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return value == "true"


def _id(name: str, value: str) -> uuid.UUID:
    try:
        return uuid.UUID(value)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be an id.", param=name) from error


def _moment(name: str, value: str) -> dt.datetime:
    try:
        moment = parse_datetime(value.replace(" ", "+"))  # an unescaped plus arrives as a blank
    except ValueError:
        moment = None
    if moment is None or not 2000 <= moment.year <= 9000:
        raise InvalidRequest(f"{name} must be a time, as 2026-01-31T12:00:00Z.", param=name)
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


_Filter = tuple[str, Callable[[str, str], Any], str]
#: Query parameter -> the look-up, its parser and its description.
_FILTERS: dict[str, _Filter] = {
    "model": ("model", _text, "Only requests for this model."),
    "endpoint": ("endpoint", _text, "Only requests to this address: /v1/chat/completions, …"),
    "finish_reason": (
        "finish_reason",
        _text,
        "Only requests with this finish reason: stop, length, cancelled, error, …",
    ),
    "error_code": ("error_code", _text, "Only requests that failed with this code."),
    "stream": ("stream", _flag, "Only streamed requests (true) or only others (false)."),
    "api_key_id": ("api_key_id", _id, "Only requests with this key."),
    "adapter_version_id": ("adapter_version_id", _id, "Only requests to this adapter version."),
    "accepted_after": (
        "accepted_at__gte",
        _moment,
        "Only requests accepted at this time or later.",
    ),
    "accepted_before": ("accepted_at__lt", _moment, "Only requests accepted before this time."),
}


class RequestsView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema(
        "requests_list",
        [
            *PAGE_PARAMETERS,
            *(OpenApiParameter(name, str, description=d) for name, (*_, d) in _FILTERS.items()),
        ],
        responses=page_of(InferenceRequestSerializer),
    )
    def get(self, request: Request) -> Response:
        """List the tenant's requests that have ended, newest first."""
        rows = _with_content(InferenceRequest.objects.allowed())
        for name, (lookup, read, _) in _FILTERS.items():
            wanted = request.query_params.get(name)
            if wanted is None:
                continue
            if "\0" in wanted:
                rows = rows.none()
            else:
                rows = rows.filter(**{lookup: read(name, wanted)})
        return page(request, rows, InferenceRequestSerializer, cursor="cursor")


def _with_content(rows: QuerySet[InferenceRequest]) -> QuerySet[InferenceRequest]:
    stored = RequestContent.objects.filter(request_id=OuterRef("request_id"))
    return rows.annotate(has_content=Exists(stored))


class RequestView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema(responses=InferenceRequestSerializer)
    def get(self, request: Request, request_id: str) -> Response:
        row = services.request_get(request_id=request_id)
        shown = _with_content(InferenceRequest.objects.allowed().filter(pk=row.pk)).get()
        return Response(InferenceRequestSerializer(shown).data)


class RequestContentSerializer(serializers.Serializer[StoredWords]):
    id = serializers.CharField(source="request_id")
    object = serializers.CharField(default="request.content")
    stored_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField()
    prompt = serializers.DictField(
        help_text="The prompt: `messages` of a chat, else `text` or `token_ids`."
    )
    outputs = serializers.ListField(child=serializers.CharField(), help_text="The answers.")
    finish_reason = serializers.CharField()
    is_truncated = serializers.BooleanField(help_text="Whether a part was too long to store.")


class RequestContentView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("GET", "DELETE"), Permission.REQUESTS_CONTENT)

    @extend_schema("request_content", responses=RequestContentSerializer)
    def get(self, request: Request, request_id: str) -> Response:
        """Return a request's prompt and answers, if the tenant stores them."""
        words = services.content_get(request_id=request_id)
        return Response(RequestContentSerializer(words).data)

    @extend_schema("request_content_delete", responses={204: None})
    def delete(self, request: Request, request_id: str) -> Response:
        """Delete a request's prompt and answers; its log line stays."""
        services.content_delete(request_id=request_id)
        return Response(status=204)


class LogPolicySerializer(serializers.ModelSerializer[LogPolicy]):
    object = serializers.CharField(default="request_log", read_only=True)
    content = serializers.ChoiceField(LogPolicy.Content.choices, help_text=_CONTENT_HELP)

    class Meta:
        model = LogPolicy
        fields = ("object", "content", "content_days", "metadata_days")


class LogPolicySetSerializer(StrictSerializer):
    content = ChoiceField(LogPolicy.Content.choices, required=False, help_text=_CONTENT_HELP)
    content_days = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_CONTENT_DAYS,
        help_text="The number of days after which prompts and answers are deleted.",
    )
    metadata_days = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_METADATA_DAYS,
        help_text="The number of days after which log lines are deleted. Usage stays.",
    )


class LogPolicyView(TenantAPIView):
    permissions: ClassVar = {"PUT": Permission.TENANT_MANAGE}

    @extend_schema("request_log", responses=LogPolicySerializer)
    def get(self, request: Request) -> Response:
        """Return the tenant's policy for storing requests, and the time limits."""
        return Response(LogPolicySerializer(services.log_policy()).data)

    @extend_schema("request_log_set", request=LogPolicySetSerializer, responses=LogPolicySerializer)
    def put(self, request: Request) -> Response:
        """Set the policy for storing requests. Fields that are left out stay as they are."""
        body = LogPolicySetSerializer.parsed(request)
        policy = services.log_policy()
        policy = services.log_policy_set(
            content=body.get("content", policy.content),
            content_days=body.get("content_days", policy.content_days),
            metadata_days=body.get("metadata_days", policy.metadata_days),
        )
        return Response(LogPolicySerializer(policy).data)


class RefusalHourSerializer(serializers.ModelSerializer[RefusalHour]):
    object = serializers.CharField(default="refusal_hour", read_only=True)
    cursor = serializers.UUIDField(source="pk")

    class Meta:
        model = RefusalHour
        fields = ("object", "cursor", "starts_at", "endpoint", "status", "code", "requests")


class RefusalsView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.REQUESTS_READ}

    @extend_schema("refusals_list", PAGE_PARAMETERS, responses=page_of(RefusalHourSerializer))
    def get(self, request: Request) -> Response:
        """Return how many requests were refused at admission, by hour (UTC) and reason."""
        return page(request, RefusalHour.objects.all(), RefusalHourSerializer, cursor="cursor")
