"""The tenant's usage by model or key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.console import usage as reads
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.tenants.auth import Permission
from controlplane.usage.training import training_usage_by_day


@require_safe
@member_page(permission=Permission.USAGE_READ)
def usage(request: ConsoleRequest) -> HttpResponse:
    span = _choice(request, "span", reads.SPANS)
    by = _choice(request, "by", reads.GROUPS)
    measure = _choice(request, "measure", reads.MEASURES)
    report = reads.usage_report(span=span, by=by, measure=measure, now=timezone.now())
    today, (_, count, is_hourly) = timezone.now().date(), reads.SPANS[span]
    first = today - dt.timedelta(days=count // 24 if is_hourly else count - 1)
    context = {
        "report": report,
        "training": training_usage_by_day(first, today),
        "span": span,
        "by": by,
        "measure": measure,
        "measure_label": reads.MEASURES[measure],
        "span_label": reads.SPANS[span][0],
        "bucket_label": "an hour" if reads.SPANS[span][2] else "a day",
        "spans": [(name, label) for name, (label, _, _) in reads.SPANS.items()],
        "groups": [("model", "By model"), ("key", "By key")],
        "measures": list(reads.MEASURES.items()),
    }
    return render(request, "console/usage.html", context)


def _choice(request: ConsoleRequest, name: str, known: Mapping[str, object]) -> str:
    """Return the address's value, or the first choice if it is unknown."""
    wanted = request.GET.get(name, "")
    return wanted if wanted in known else next(iter(known))
