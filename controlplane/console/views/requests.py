"""The tenant's requests: the list, newest first, and the details of each."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from contract.messages.protocol import Sampling
from controlplane.adapters.models import BaseModel
from controlplane.console import request_log as reads
from controlplane.console.access import ConsoleRequest, member_page
from controlplane.console.transcripts import answer_passages, prompt_passages
from controlplane.errors import NotFound, from_worker
from controlplane.requestlog import services
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenants.auth import Permission
from controlplane.usage.models import UsageRecord


@require_safe
@member_page(permission=Permission.REQUESTS_READ)
def requests(request: ConsoleRequest) -> HttpResponse:
    now = timezone.now()
    wanted = reads.Wanted.read(request.GET)
    page = reads.log_page(
        wanted, now=now, before=_cursor(request, "before"), after=_cursor(request, "after")
    )
    refusals = reads.refusals_of_last_day(now) if page.is_first else []
    context = _context(wanted, page) | {
        "states": [(wanted.query(state=name), name, text) for name, text in reads.STATES.items()],
        "spans": [(wanted.query(span=name), name, text) for name, (text, _) in reads.SPANS.items()],
        "models": reads.models_used(now),
        "slow_ms": reads.SLOW_MS,
        "policy": services.log_policy(),
        "refusals": refusals,
        "num_refused": sum(reason.requests for reason in refusals),
    }
    return render(request, "console/requests.html", context)


@require_safe
@member_page(permission=Permission.REQUESTS_READ)
def newest(request: ConsoleRequest) -> HttpResponse:
    """Render the newest page's list; 204 when the browser already shows its first line."""
    wanted = reads.Wanted.read(request.GET)
    page = reads.log_page(wanted, now=timezone.now())
    if page.newest_id == request.GET.get("have", ""):
        return HttpResponse(status=204)
    return render(request, "console/_requests.html", _context(wanted, page))


@require_safe
@member_page(permission=Permission.REQUESTS_READ)
def request(request: ConsoleRequest, request_id: str) -> HttpResponse:
    """Show one request."""
    row = services.request_get(request_id=request_id)
    decode_ms = row.total_ms - (row.first_token_ms or row.total_ms)
    context = {
        "line": reads.line_of(row),
        "sampling": _sampling(row),
        "drafted": sum(n for name, n in (row.drafts or {}).items() if name != "rejected"),
        "phases": reads.phase_bars(row),
        "status": from_worker(row.error_code, "").status if row.error_code else None,
        "tokens_per_s": (row.completion_tokens - 1) / decode_ms * 1000 if decode_ms > 0 else 0,
        "base": BaseModel.objects.filter(name=row.base_model).first(),
        "billed": UsageRecord.objects.filter(request_id=row.request_id).first(),
        "policy": services.log_policy(),
        **_words(request, row.request_id),
    }
    return render(request, "console/request.html", context)


#: The order on the page; the database's order differs.
_SAMPLING = tuple(field.name for field in dataclasses.fields(Sampling))


def _sampling(row: InferenceRequest) -> list[tuple[str, Any]]:
    said = row.sampling or {}
    known = [(name, said[name]) for name in _SAMPLING if name in said]
    return known + sorted(item for item in said.items() if item[0] not in _SAMPLING)


def _words(request: ConsoleRequest, request_id: str) -> dict[str, Any]:
    """Return the stored prompt and answers, for people with the permission to read them."""
    if not request.member.can_read_words:
        return {}
    try:
        words = services.content_get(request_id=request_id)
    except NotFound:
        return {}
    return {
        "words": words,
        "prompt": prompt_passages(words),
        "answers": answer_passages(words),
    }


def _context(wanted: reads.Wanted, page: reads.LogPage) -> dict[str, Any]:
    return {"wanted": wanted, "query": wanted.query(), "page": page, "phases": reads.PHASES}


def _cursor(request: ConsoleRequest, name: str) -> uuid.UUID | None:
    """Return the row id at which the page begins, from its address, or None."""
    try:
        return uuid.UUID(request.GET.get(name, ""))
    except ValueError:
        return None
