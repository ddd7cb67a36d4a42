"""Compute the shapes of charts, which the templates draw as SVG. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar, in the units of its chart's view box; `label` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    label: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    width: int
    height: int
    bars: tuple[Bar, ...]
    top: float  # the value of a bar of full height


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """The parts of one bar, lowest first, each with the number of its series, and one tooltip."""

    label: str
    parts: tuple[tuple[int, Bar], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedChart:
    width: int
    height: int
    bars: tuple[StackedBar, ...]
    top: float  # the value of a bar of full height


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    width: int
    height: int
    points: str  # for <polyline points>
    beside: str  # points of a second line; empty: there is none
    low: float
    high: float
    first: float  # the x of the first and last points
    last: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A horizontal line from the lower to the upper bound, with a dot at the value, if known."""

    series: int
    y: float
    left: float
    right: float
    dot: float | None
    label: str  # its tooltip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChart:
    width: int
    height: int
    intervals: tuple[Interval, ...]
    top: float  # the value at the right edge


def bar_chart(
    values: Sequence[tuple[str, float]],
    *,
    width: int = 600,
    height: int = 120,
    top: float | None = None,
) -> BarChart:
    """Make one bar for each (label, value); the largest has the full height.

    A bar of a value above zero is at least two units high, so that one request stays visible beside
    thousands.

    top  the value of full height, for charts on one scale; None: the largest
    """
    if top is None:
        top = max((value for _, value in values), default=0.0)
    step = width / max(len(values), 1)
    bars = []
    for index, (label, value) in enumerate(values):
        size = max(2.0, value / top * height) if value > 0 else 0.0
        bars.append(
            Bar(
                x=round(index * step + step * 0.1, 2),
                y=round(height - size, 2),
                width=round(step * 0.8, 2),
                height=round(size, 2),
                label=label,
            )
        )
    return BarChart(width=width, height=height, bars=tuple(bars), top=top)


def stacked_chart(
    values: Sequence[tuple[str, Sequence[float]]], *, width: int = 600, height: int = 160
) -> StackedChart:
    """Make one bar for each (label, values of the series), with the values stacked."""
    top = max((sum(parts) for _, parts in values), default=0.0)
    step = width / max(len(values), 1)
    bars = []
    for index, (label, parts) in enumerate(values):
        tip = f"{label} – {sum(parts):,.0f}"
        floor, drawn = float(height), []
        for series, value in enumerate(parts):
            if value <= 0:
                continue
            size = max(1.0, value / top * height)
            floor = max(0.0, floor - size)
            bar = Bar(
                x=round(index * step + step * 0.1, 2),
                y=round(floor, 2),
                width=round(step * 0.8, 2),
                height=round(size, 2),
                label=tip,
            )
            drawn.append((series, bar))
        bars.append(StackedBar(label=tip, parts=tuple(drawn)))
    return StackedChart(width=width, height=height, bars=tuple(bars), top=top)


def span_bar(
    spans: Sequence[tuple[int, float, float]],
    *,
    label: str,
    top: float,
    width: int = 600,
    height: int = 12,
) -> StackedBar:
    """Make one horizontal bar of spans (series, begin, end).

    The part beyond `top` is cut off; the last span that is not empty is at least two units wide.
    """
    per_unit = width / top if top > 0 else 0.0
    drawn = []
    for series, begin, end in spans:
        if end <= begin or begin >= top:
            continue
        left = min(begin * per_unit, width - 2.0)
        right = min(max(end * per_unit, left), float(width))
        drawn.append((series, left, right))
    if drawn:
        series, left, right = drawn[-1]
        drawn[-1] = (series, left, max(right, left + 2.0))
    parts = tuple(
        (
            series,
            Bar(
                x=round(left, 2),
                y=0.0,
                width=round(right - left, 2),
                height=float(height),
                label=label,
            ),
        )
        for series, left, right in drawn
    )
    return StackedBar(label=label, parts=parts)


def interval_chart(
    bounds: Sequence[tuple[str, float, float | None, float | None]],
    *,
    width: int = 600,
    row_height: int = 16,
) -> IntervalChart:
    """Make one line for each (label, low, value, high), the first on top, on a scale from 0.

    A `high` of None is not known: the line goes to the right edge.
    """
    known = [edge for _, *edges in bounds for edge in edges if edge is not None]
    top = max(known, default=0.0) * 1.1 or 1.0

    def at(value: float) -> float:
        return round(min(value / top, 1.0) * width, 2)

    intervals = tuple(
        Interval(
            series=index,
            y=(index + 0.5) * row_height,
            left=at(low),
            right=at(top if high is None else high),
            dot=None if value is None else at(value),
            label=label,
        )
        for index, (label, low, value, high) in enumerate(bounds)
    )
    return IntervalChart(width=width, height=row_height * len(bounds), intervals=intervals, top=top)


def common_scale(values: Sequence[float]) -> float:
    """Return a common full value for bars: the largest, or 1.5 times the 90th percentile.

    So one request that took a minute leaves the others visible.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    return min(ordered[-1], 1.5 * ordered[(len(ordered) - 1) * 9 // 10] or ordered[-1])


def line_chart(
    points: Sequence[tuple[float, float]],
    *,
    beside: Sequence[tuple[float, float]] = (),
    width: int = 600,
    height: int = 160,
) -> LineChart | None:
    """Make a line through (x, y) points in the order of x; None for fewer than two.

    beside  the points of a second line on the same scales
    """
    if len(points) < 2:
        return None
    xs, ys = [x for x, _ in (*points, *beside)], [y for _, y in (*points, *beside)]
    left, low = min(xs), min(ys)
    span_x, span_y = (max(xs) - left) or 1.0, (max(ys) - low) or 1.0

    def drawn(line: Sequence[tuple[float, float]]) -> str:
        return " ".join(
            f"{(x - left) / span_x * width:.1f},{height - (y - low) / span_y * height:.1f}"
            for x, y in line
        )

    return LineChart(
        width=width,
        height=height,
        points=drawn(points),
        beside=drawn(beside),
        low=low,
        high=max(ys),
        first=left,
        last=max(xs),
    )


def loss_chart(progress: Mapping[str, Any]) -> LineChart | None:
    """Make the chart of a run's progress: the losses in training, and beside them in validation."""

    def losses(name: str) -> list[tuple[float, float]]:
        return [(float(step), float(loss)) for step, loss in progress.get(name, [])]

    return line_chart(losses("losses"), beside=losses("validation_losses"))
