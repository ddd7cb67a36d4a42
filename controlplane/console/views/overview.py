"""The first page: the last day, the tenant's adapters, and an example request."""

from __future__ import annotations

from django.conf import settings
from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.adapters.models import BaseModel, is_serving
from controlplane.console import overview as reads
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.request_log import state_of


@require_safe
@member_page
def overview(request: ConsoleRequest) -> HttpResponse:
    adapters = reads.adapter_rows()
    requests = reads.recent_requests() if request.member.can_read_requests else []
    context = {
        "day": reads.last_day(timezone.now()),
        "adapters": adapters,
        "adapters_busy": any(row.is_busy for row in adapters),
        "requests": [(row, state_of(row)) for row in requests],
        "tokens": reads.num_tokens_by_request(requests),
        "example_model": _example_model(adapters),
        "base_url": settings.BASE_URL,
    }
    return render(request, "console/overview.html", context)


def _example_model(rows: list[reads.AdapterRow]) -> str:
    """Return the name of a live adapter, else of a base model."""
    for row in rows:
        if row.adapter.live_version_id:
            return row.adapter.name
    base_model = BaseModel.objects.filter(is_serving()).order_by("name").first()
    return base_model.name if base_model else "your-adapter"


@member_page
def not_found(request: ConsoleRequest, rest: str) -> HttpResponse:
    """Answer all other addresses under /console/."""
    raise Http404
