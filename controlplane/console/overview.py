"""The data of the overview: numbers of the last day, and the tenant's adapters."""

from __future__ import annotations

import dataclasses
import datetime as dt

from django.db.models import Count, F, Sum
from django.db.models.functions import TruncHour

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.console.charts import BarChart, bar_chart
from controlplane.console.request_log import FAILED
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import RefusalHour
from controlplane.usage.models import UsageHour, UsageRecord

HOURS = 24


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The tenant's last 24 hours."""

    num_requests: int
    #: Numbers of accepted requests; refused ones are counted apart.
    num_errors: int
    num_refused: int
    prompt_tokens: int
    completion_tokens: int
    #: The median of the requests that had a first token; None when none had.
    first_token_ms: float | None
    chart: BarChart


def last_day(now: dt.datetime) -> Day:
    """Return the 24 hours before `now`, of the tenant in scope."""
    since = now.replace(minute=0, second=0, microsecond=0) - dt.timedelta(hours=HOURS - 1)
    requests = InferenceRequest.objects.filter(accepted_at__gte=since)
    counts = requests.aggregate(all=Count("id"), errors=Count("id", filter=FAILED))
    tokens = UsageHour.objects.filter(starts_at__gte=since).aggregate(
        prompt=Sum("prompt_tokens"), completion=Sum("completion_tokens")
    )
    refused = RefusalHour.objects.filter(starts_at__gte=since).aggregate(requests=Sum("requests"))
    return Day(
        num_requests=counts["all"],
        num_errors=counts["errors"],
        num_refused=refused["requests"] or 0,
        prompt_tokens=tokens["prompt"] or 0,
        completion_tokens=tokens["completion"] or 0,
        first_token_ms=_median_first_token_ms(since),
        chart=bar_chart(_requests_by_hour(since)),
    )


def _median_first_token_ms(since: dt.datetime) -> float | None:
    measured = InferenceRequest.objects.filter(
        accepted_at__gte=since, first_token_ms__isnull=False
    ).order_by("first_token_ms")
    count = measured.count()
    if not count:
        return None
    return measured.values_list("first_token_ms", flat=True)[count // 2]


def _requests_by_hour(since: dt.datetime) -> list[tuple[str, float]]:
    found = dict(
        InferenceRequest.objects.filter(accepted_at__gte=since)
        .annotate(hour=TruncHour("accepted_at"))
        .values("hour")
        .annotate(num=Count("id"))
        .values_list("hour", "num")
    )
    hours = [since + dt.timedelta(hours=offset) for offset in range(HOURS)]
    return [
        (f"{hour:%H}:00 – {found.get(hour, 0)} requests", float(found.get(hour, 0)))
        for hour in hours
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRow:
    """An adapter, with its live version loaded, and its newest version."""

    adapter: Adapter
    newest: AdapterVersion | None

    @property
    def is_busy(self) -> bool:
        """Return whether the newest version's status will change soon."""
        states = {AdapterVersion.Status.UPLOADED, AdapterVersion.Status.VALIDATING}
        return self.newest is not None and self.newest.status in states


def adapter_rows() -> list[AdapterRow]:
    """Return the tenant's adapters, ordered by name."""
    adapters = Adapter.objects.select_related("base_model", "live_version").order_by("name")
    versions = AdapterVersion.objects.order_by("adapter_id", "-number").distinct("adapter_id")
    newest = {version.adapter_id: version for version in versions}
    return [AdapterRow(adapter=adapter, newest=newest.get(adapter.id)) for adapter in adapters]


def recent_requests(limit: int = 10) -> list[InferenceRequest]:
    return list(InferenceRequest.objects.order_by("-accepted_at")[:limit])


def num_tokens_by_request(requests: list[InferenceRequest]) -> dict[str, int]:
    """Return prompt plus completion tokens, by request id."""
    return dict(
        UsageRecord.objects.filter(request_id__in=[request.request_id for request in requests])
        .annotate(total=F("prompt_tokens") + F("completion_tokens"))
        .values_list("request_id", "total")
    )
