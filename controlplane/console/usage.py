"""The data of the usage page: a tenant's tokens by hour or day, grouped by model or by key."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any

from django.db.models import Sum

from controlplane.console.charts import StackedChart, stacked_chart
from controlplane.tenants.models import ApiKey
from controlplane.usage.models import UsageDay, UsageHour, UsageTotal

#: Name -> label, number of buckets, and whether a bucket is an hour.
SPANS: dict[str, tuple[str, int, bool]] = {
    "day": ("24 hours", 24, True),
    "week": ("7 days", 7 * 24, True),
    "month": ("30 days", 30, False),
    "quarter": ("90 days", 90, False),
}
GROUPS = {"model": "model", "key": "api_key_id"}
MEASURES = {"tokens": "Tokens", "requests": "Requests"}
#: Number of models or keys with their own colour in the chart; the others share one.
MAX_SERIES = 5
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The sums of one model or key in the whole span."""

    label: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    #: The colour in the chart; the last one is shared.
    series: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    rows: list[Row]
    chart: StackedChart
    totals: dict[str, int]


def usage_report(*, span: str, by: str, measure: str, now: dt.datetime) -> UsageReport:
    """Report on the tenant in scope, up to `now`; the tables above have the other arguments."""
    _, count, is_hourly = SPANS[span]
    starts = _starts(now, count, is_hourly)
    table: type[UsageTotal] = UsageHour if is_hourly else UsageDay
    field = GROUPS[by]
    found: list[dict[str, Any]] = list(
        table.objects.filter(starts_at__gte=starts[0])
        .values("starts_at", field)
        .annotate(**{f"sum_{name}": Sum(name) for name in _SUMS})
    )
    labels = _labels(field, {row[field] for row in found})
    sums: dict[Any, dict[str, int]] = {}
    for row in found:
        total = sums.setdefault(row[field], dict.fromkeys(_SUMS, 0))
        for name in _SUMS:
            total[name] += row[f"sum_{name}"]
    order = sorted(sums, key=lambda key: (-_measured(sums[key], measure), labels[key]))
    series = {key: min(place, MAX_SERIES - 1) for place, key in enumerate(order)}
    stacks = {start: [0.0] * MAX_SERIES for start in starts}
    for row in found:
        if row["starts_at"] in stacks:
            values = {name: row[f"sum_{name}"] for name in _SUMS}
            stacks[row["starts_at"]][series[row[field]]] += _measured(values, measure)
    form = "%Y-%m-%d %H:00" if is_hourly else "%Y-%m-%d"
    return UsageReport(
        rows=[Row(label=labels[key], series=series[key], **sums[key]) for key in order],
        chart=stacked_chart([(f"{start:{form}}", stacks[start]) for start in starts]),
        totals={name: sum(total[name] for total in sums.values()) for name in _SUMS},
    )


def _starts(now: dt.datetime, count: int, is_hourly: bool) -> list[dt.datetime]:
    last = now.astimezone(dt.UTC).replace(minute=0, second=0, microsecond=0)
    step = dt.timedelta(hours=1) if is_hourly else dt.timedelta(days=1)
    last = last if is_hourly else last.replace(hour=0)
    return [last - step * back for back in range(count - 1, -1, -1)]


def _measured(sums: dict[str, int], measure: str) -> int:
    if measure == "requests":
        return sums["requests"]
    return sums["prompt_tokens"] + sums["completion_tokens"]


def _labels(field: str, keys: set[Any]) -> dict[Any, str]:
    if field == "model":
        return {key: str(key) for key in keys}
    names: dict[Any, str] = {
        key.pk: f"{key.name} (…{key.last4})" for key in ApiKey.objects.filter(pk__in=keys)
    }
    names[None] = "the playground"  # people have no key
    return {key: names.get(key, "a deleted key") for key in keys}
