"""GET /v1/organization/usage/completions: usage in buckets of time, in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any, ClassVar

from django.db.models import Count, F, QuerySet, Sum
from django.db.models.functions import TruncMinute
from django.http import QueryDict
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.gateway.rest.fields import Constant
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.tenants.permissions import Permission
from controlplane.usage.models import UsageDay, UsageHour, UsageRecord, UsageTotal

#: Width -> seconds, table of its totals, buckets of a page by default, and at most.
WIDTHS: dict[str, tuple[int, type[UsageTotal] | None, int, int]] = {
    "1m": (60, None, 60, 1440),
    "1h": (3600, UsageHour, 24, 168),
    "1d": (86400, UsageDay, 7, 31),
}
GROUPS = {"model": "model", "api_key_id": "api_key_id"}
MAX_TIME = 253_402_300_799  # the end of the year 9999


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """A checked request; times are Unix seconds at the start of a bucket."""

    start: int
    end: int
    width: str
    groups: tuple[str, ...]
    limit: int


# For the document: `page` writes plain dicts, since a page may have many thousand results.
class UsageResultSerializer(serializers.Serializer[Any]):
    """The sums of one bucket, or of one group in it."""

    object = Constant("organization.usage.completions.result")
    input_tokens = serializers.IntegerField(min_value=0)
    output_tokens = serializers.IntegerField(min_value=0)
    input_cached_tokens = serializers.IntegerField(min_value=0, help_text="Of the input tokens.")
    input_audio_tokens = Constant(0)
    output_audio_tokens = Constant(0)
    num_model_requests = serializers.IntegerField(min_value=0)
    project_id = Constant(None)
    user_id = Constant(None)
    api_key_id = serializers.CharField(allow_null=True, help_text="With group_by alone.")
    model = serializers.CharField(allow_null=True, help_text="With group_by alone.")
    batch = Constant(None)


class UsageBucketSerializer(serializers.Serializer[Any]):
    object = Constant("bucket")
    start_time = serializers.IntegerField()
    end_time = serializers.IntegerField()
    results = UsageResultSerializer(many=True)


class CompletionsUsageSerializer(serializers.Serializer[Any]):
    object = Constant("page")
    data = UsageBucketSerializer(many=True)  # type: ignore[assignment]
    has_more = serializers.BooleanField()
    next_page = serializers.CharField(allow_null=True)


_TIME = {"type": "integer", "minimum": 0, "maximum": MAX_TIME}
_SIZES = ", ".join(f"{most} of {width}" for width, (_, _, _, most) in WIDTHS.items())


class CompletionsUsageView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(
        "gateway_usage",
        [
            OpenApiParameter("start_time", _TIME, required=True, description="Unix seconds."),
            OpenApiParameter("end_time", _TIME, description="Unix seconds; by default now."),
            OpenApiParameter(
                "bucket_width",
                {"type": "string", "enum": list(WIDTHS), "default": "1d"},
                description="In UTC.",
            ),
            OpenApiParameter(
                "group_by",
                {"type": "array", "items": {"enum": list(GROUPS)}},
                description="What results are told apart by.",
            ),
            OpenApiParameter(
                "limit",
                {"type": "integer", "minimum": 1},
                description=f"Buckets of a page: at most {_SIZES}.",
            ),
            OpenApiParameter("page", str, description="The `next_page` of the page before."),
        ],
        responses=CompletionsUsageSerializer,
    )
    def get(self, request: Request) -> Response:
        """Tokens and requests in buckets of time."""
        return Response(page(parse(request.query_params, now=dt.datetime.now(dt.UTC))))


def parse(params: QueryDict, *, now: dt.datetime) -> Query:
    """Check the query parameters. Raises InvalidRequest that names the parameter."""
    width = params.get("bucket_width", "1d")
    if width not in WIDTHS:
        raise InvalidRequest("bucket_width is 1m, 1h or 1d.", param="bucket_width")
    seconds, _, usual, most = WIDTHS[width]
    limit = _number(params, "limit", usual)
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit is from 1 to {most} for {width}.", param="limit")
    groups = tuple(params.getlist("group_by[]") or params.getlist("group_by"))
    for group in groups:
        if group not in GROUPS:
            raise InvalidRequest(f"group_by is of {', '.join(GROUPS)}.", param="group_by")
    if "start_time" not in params:
        raise InvalidRequest("start_time is missing: Unix seconds.", param="start_time")
    start = _number(params, "page", _number(params, "start_time", 0))
    end = _number(params, "end_time", int(now.timestamp()) + seconds)
    if end <= start:
        raise InvalidRequest("end_time is not after start_time.", param="end_time")
    return Query(start - start % seconds, end, width, groups, limit)


def _number(params: QueryDict, name: str, default: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) > MAX_TIME:
        raise InvalidRequest(f"{name} is no number of this kind.", param=name)
    return int(text)


def page(query: Query) -> dict[str, Any]:
    """Return one page of the tenant in scope. `next_page` is the start of the next bucket."""
    seconds, _, _, _ = WIDTHS[query.width]
    stop = min(query.end, query.start + query.limit * seconds)
    names = [GROUPS[group] for group in query.groups]
    rows = _rows(query, stop, names)
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["bucket"].timestamp()), []).append(_result(row))
    starts = range(query.start, stop, seconds)
    has_more = stop < query.end
    return {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": start,
                "end_time": min(start + seconds, query.end),
                "results": found.get(start, []),
            }
            for start in starts
        ],
        "has_more": has_more,
        "next_page": str(stop) if has_more else None,
    }


def _rows(query: Query, stop: int, names: list[str]) -> list[dict[str, Any]]:
    """Return sums by bucket and group; buckets of a minute are summed from usage records."""
    span = (_moment(query.start), _moment(stop))
    totals = WIDTHS[query.width][1]
    found: QuerySet[Any] = (
        UsageRecord.objects.allowed()
        .filter(occurred_at__gte=span[0], occurred_at__lt=span[1])
        .annotate(bucket=TruncMinute("occurred_at", tzinfo=dt.UTC))
        if totals is None
        else totals.objects.allowed()
        .filter(starts_at__gte=span[0], starts_at__lt=span[1])
        .annotate(bucket=F("starts_at"))
    )
    return list(
        found.values("bucket", *names)
        .annotate(
            num=Count("id") if totals is None else Sum("requests"),
            read=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            written=Sum("completion_tokens"),
        )
        .order_by("bucket", *names)
    )


def _result(row: dict[str, Any]) -> dict[str, Any]:
    key = row.get("api_key_id")
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": row["read"],
        "output_tokens": row["written"],
        "input_cached_tokens": row["cached"],
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": row["num"],
        "project_id": None,
        "user_id": None,
        "api_key_id": str(key) if key else None,
        "model": row.get("model"),
        "batch": None,
    }


def _moment(seconds: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(min(seconds, MAX_TIME), tz=dt.UTC)
