"""The morning page: the changes that schedules made last night."""

from __future__ import annotations

import dataclasses

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.charts import LineChart, loss_chart
from controlplane.console.evaluation_rows import Row, comparison_rows
from controlplane.evaluations.morning.report import NIGHT, Entry, morning_of
from controlplane.evaluations.morning.telling import moment_of
from controlplane.tenants.models import is_slug
from controlplane.training.models import Schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An entry with its pictures. `loss_change`: of the loss in validation; None: unknown."""

    entry: Entry
    chart: LineChart | None
    rows: list[Row]
    loss_change: float | None


@require_safe
@member_page
def morning(request: ConsoleRequest) -> HttpResponse:
    until, adapter = moment_of(request.GET.get("until", "")), request.GET.get("adapter", "")
    adapter = adapter if is_slug(adapter) else ""
    found = morning_of(until, by=request.member.principal, adapter=adapter or None)
    later = found.until + NIGHT
    context = {
        "morning": found,
        "nights": [_shown(entry) for entry in found.entries],
        "adapter": adapter,
        "earlier": found.since.isoformat(timespec="seconds"),
        "later": later.isoformat(timespec="seconds") if later <= timezone.now() else "",
        "is_latest": until is None,
        "has_schedules": Schedule.objects.exists(),
    }
    return render(request, "console/morning.html", context)


def _shown(entry: Entry) -> Shown:
    before, after = entry.best_loss_before, entry.best_loss
    return Shown(
        entry=entry,
        chart=loss_chart(entry.run.progress) if entry.run else None,
        rows=comparison_rows(entry.compared) if entry.compared else [],
        loss_change=None if before is None or after is None else after - before,
    )
