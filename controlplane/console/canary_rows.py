"""The canary on an alias's page: each measure of canary and primary as a picture."""

from __future__ import annotations

import dataclasses

from controlplane.aliases.comparison import Comparison
from controlplane.aliases.verdict import LATENCIES, RATES, Guard, LatencyMeasure, RateMeasure
from controlplane.console.charts import IntervalChart, StackedBar, interval_chart, span_bar

PRIMARY, CANARY = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRow:
    """One measure, in words and as two intervals on one scale: the primary's, then the canary's.

    limit  when the canary is rolled back; "": it is not watched
    """

    label: str
    primary: str
    canary: str
    limit: str
    chart: IntervalChart


def split_bar(canary_percent: int) -> StackedBar:
    """Return the bar of the callers' shares of primary and canary."""
    edge = 100 - canary_percent
    label = f"primary {edge} %, canary {canary_percent} %" if canary_percent else "primary 100 %"
    spans = [(PRIMARY, 0.0, float(edge)), (CANARY, float(edge), 100.0)]
    return span_bar(spans, label=label, top=100.0)


def measure_rows(found: Comparison) -> list[MeasureRow]:
    """Return a row for each measure that the guard compares."""
    rates = [_rate_row(measure, found) for measure in RATES]
    return [*rates, *(_latency_row(measure, found) for measure in LATENCIES)]


def _rate_row(measure: RateMeasure, found: Comparison) -> MeasureRow:
    told, bounds = [], []
    for name, counts in (("primary", found.primary), ("canary", found.canary)):
        rate = measure.of(counts, found.guard.risk)
        value = "–" if rate.value is None else f"{rate.value:.1%}"
        told.append(f"{value} of {rate.trials:,}")
        # Before the first request every rate is possible: its interval would hide the other.
        low, high = (rate.low, rate.high) if rate.trials else (0.0, 0.0)
        label = f"{name}: from {rate.low:.1%} to {rate.high:.1%}"
        bounds.append((label, low, rate.value, high))
    points = getattr(found.guard, measure.guard_field)
    return MeasureRow(
        label=measure.label,
        primary=told[0],
        canary=told[1],
        limit="" if points is None else f"{points:g} points worse",
        chart=interval_chart(bounds),
    )


def _latency_row(measure: LatencyMeasure, found: Comparison) -> MeasureRow:
    told, bounds = [], []
    for name, counts in (("primary", found.primary), ("canary", found.canary)):
        low, high = measure.of(counts, found.guard.risk)
        is_known = low is not None or high is not None
        told.append(f"{_ms(low or 0.0)} to {_ms(high)}" if is_known else "–")
        edge = high if is_known else 0.0
        bounds.append((f"{name}: the median is {told[-1]}", low or 0.0, None, edge))
    return MeasureRow(
        label=f"{measure.label} (median)",
        primary=told[0],
        canary=told[1],
        limit=_latency_limit(measure, found.guard),
        chart=interval_chart(bounds),
    )


def _latency_limit(measure: LatencyMeasure, guard: Guard) -> str:
    factor = getattr(guard, measure.guard_field)
    return "" if factor is None else f"{factor:g} times and {measure.slack_ms:g} ms more"


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"
