"""The waiting requests: by base model and class, and the tenants with most."""

from __future__ import annotations

import time
import uuid
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from controlplane.errors import Unavailable
from controlplane.operator.pages.rendering import page, span
from controlplane.operator.waiting import TOP, ClassQueue, class_queues
from controlplane.tenants.models import Tenant


@require_safe
def queues(request: HttpRequest) -> HttpResponse:
    """Show the queues; the part that changes reloads itself."""
    context: dict[str, Any] = {"pool": settings.POOL, "rows": [], "problem": "", "top": TOP}
    try:
        found = class_queues()
        slugs = _slugs(found)
        context["rows"] = [_row(queue, slugs) for queue in found]
    except Unavailable as error:
        context["problem"] = error.message
    template = "_queues" if request.headers.get("HX-Request") else "queues"
    return page(request, template, "Queues", **context)


def _slugs(found: list[ClassQueue]) -> dict[str, str]:
    """Return the slugs of all shown tenants, by id."""
    ids = set()
    for queue in found:
        for backlog in queue.top:
            try:
                ids.add(uuid.UUID(backlog.tenant_id))
            except ValueError:
                continue
    rows = Tenant.objects.filter(pk__in=ids).values_list("pk", "slug")
    return {str(pk): slug for pk, slug in rows}


def _row(queue: ClassQueue, slugs: dict[str, str]) -> dict[str, Any]:
    now = time.time()
    return {
        "queue": queue,
        "oldest": span(queue.oldest_s) if queue.requests else "–",
        "tenants": [
            {
                "slug": slugs.get(backlog.tenant_id, backlog.tenant_id),
                "id": backlog.tenant_id if backlog.tenant_id in slugs else "",
                "requests": backlog.requests,
                "tokens": backlog.tokens,
                "oldest": span(max(0.0, now - backlog.since)) if backlog.since else "–",
            }
            for backlog in queue.top
        ],
    }
