"""GET /v1/organization/usage/completions: usage in buckets of time, in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

from django.db.models import Count, F, QuerySet, Sum
from django.db.models.functions import TruncMinute
from django.http import HttpRequest, HttpResponseBase, JsonResponse, QueryDict

from controlplane.errors import InvalidRequest
from controlplane.gateway import callers
from controlplane.gateway.views import gateway_view
from controlplane.infra.threads import query_in_thread
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.permissions import Permission
from controlplane.usage.models import UsageDay, UsageHour, UsageRecord, UsageTotal

#: Width -> seconds, where its totals are, buckets of a page unless told, and at most.
WIDTHS: dict[str, tuple[int, type[UsageTotal] | None, int, int]] = {
    "1m": (60, None, 60, 1440),
    "1h": (3600, UsageHour, 24, 168),
    "1d": (86400, UsageDay, 7, 31),
}
GROUPS = {"model": "model", "api_key_id": "api_key_id"}
MAX_TIME = 253_402_300_799  # the end of the year 9999


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What was asked for; times are Unix seconds at the start of a bucket."""

    start: int
    end: int
    width: str
    groups: tuple[str, ...]
    limit: int


@gateway_view("GET")
async def completions_usage(request: HttpRequest) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.USAGE_READ)
    query = parse(request.GET, now=dt.datetime.now(dt.UTC))

    def load() -> dict[str, Any]:
        with tenant_scope(principal.tenant.id):
            return page(query)

    return JsonResponse(await query_in_thread(load))


def parse(params: QueryDict, *, now: dt.datetime) -> Query:
    """Raises InvalidRequest that names the parameter."""
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
    """One page of the tenant in scope. `next_page` is the start of the next bucket."""
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
    """Sums by bucket and group; of a minute from the records themselves."""
    span = (_moment(query.start), _moment(stop))
    totals = WIDTHS[query.width][1]
    found: QuerySet[Any] = (
        UsageRecord.objects.filter(occurred_at__gte=span[0], occurred_at__lt=span[1]).annotate(
            bucket=TruncMinute("occurred_at", tzinfo=dt.UTC)
        )
        if totals is None
        else totals.objects.filter(starts_at__gte=span[0], starts_at__lt=span[1]).annotate(
            bucket=F("starts_at")
        )
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
