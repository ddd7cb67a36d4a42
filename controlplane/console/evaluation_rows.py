"""Rows of the pages of evaluations: differences with their intervals as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from controlplane.console.charts import Interval, IntervalChart
from controlplane.evaluations.comparison import Comparison
from controlplane.evaluations.models import GateDecision

_WIDTH, _HEIGHT = 600, 16
_LABELS = {"score": "Score", "logprob": "Log-probability of a token"}

_HABITS = {
    "length": "Mean length",
    "refusals": "Refusals",
    "repeated": "Repeated text",
    "invalid": "Break their schema",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One difference in words and as a picture, whose middle is no difference.

    drop  the drop that matters; None: not set
    """

    label: str
    slice: str
    num: int
    mean: str
    span: str
    smallest_drop: str
    chart: IntervalChart
    before: str = ""
    after: str = ""
    drop: str = ""
    is_worse: bool = False


def comparison_rows(comparison: Comparison) -> list[Row]:
    """Return a row for each metric and slice of a comparison."""
    found = [
        {
            "metric": each.metric.value,
            "slice": each.slice,
            **dataclasses.asdict(each.interval),
            "before": f"{each.before:.3f}",
            "after": f"{each.after:.3f}",
            "is_worse": each.interval.high < 0,
        }
        for each in comparison.differences
    ]
    return _rows(found)


def gate_rows(gate: GateDecision) -> list[Row]:
    """Return a row for each finding of a gate."""
    return _rows([{**each, "drop": f"{each['drop']:g}"} for each in gate.findings])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HabitRow:
    """One habit of the live version's answers and the new one's; top: the value of a full bar."""

    label: str
    before: float
    after: float
    top: float
    before_text: str
    after_text: str


def habit_rows(gate: GateDecision | None) -> list[HabitRow]:
    """Return a row for each habit that both versions have a figure of."""
    both = gate.habits if gate is not None else {}
    found = []
    for name, label in _HABITS.items() if both else ():
        before, after = both["before"][name], both["after"][name]
        if before is None or after is None:
            continue
        is_length = name == "length"
        shown = "{:.0f} characters" if is_length else "{:.0%}"
        found.append(
            HabitRow(
                label=label,
                before=before,
                after=after,
                top=max(before, after, 1.0) if is_length else 1.0,
                before_text=shown.format(before),
                after_text=shown.format(after),
            )
        )
    return found


def _rows(found: Iterable[dict[str, Any]]) -> list[Row]:
    found = list(found)
    scales: dict[str, float] = {}
    for each in found:
        edge = max(abs(each["low"]), abs(each["high"]), 0.01)
        scales[each["metric"]] = max(scales.get(each["metric"], 0.0), edge)
    return [
        Row(
            label=_LABELS[each["metric"]],
            slice=each["slice"],
            num=each["num"],
            mean=f"{each['mean']:+.3f}",
            span=f"{each['low']:+.3f} to {each['high']:+.3f}",
            smallest_drop=f"{each['smallest_drop']:.3f}",
            chart=signed_chart(each["low"], each["mean"], each["high"], scales[each["metric"]]),
            before=each.get("before", ""),
            after=each.get("after", ""),
            drop=each.get("drop", ""),
            is_worse=each["is_worse"],
        )
        for each in found
    ]


def signed_chart(low: float, value: float, high: float, scale: float) -> IntervalChart:
    """Make one line from `low` to `high` on a scale from -scale to +scale."""

    def at(number: float) -> float:
        return round(min(max((number / scale + 1) / 2, 0.0), 1.0) * _WIDTH, 2)

    line = Interval(
        series=1 if high < 0 else 0,
        y=_HEIGHT / 2,
        left=at(low),
        right=at(high),
        dot=at(value),
        label=f"{value:+.3f}, from {low:+.3f} to {high:+.3f}",
    )
    return IntervalChart(width=_WIDTH, height=_HEIGHT, intervals=(line,), top=scale)
