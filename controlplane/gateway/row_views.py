"""What views of /v1 that read and write rows share: the caller's scope and origin, and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse

from controlplane.audit.origin import request_origin
from controlplane.errors import InvalidRequest
from controlplane.gateway.views import request_id_of
from controlplane.tenancy.public_ids import parse_id
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import idempotency
from controlplane.tenants.auth import Principal
from controlplane.tenants.models import IdempotencyRecord

_T = TypeVar("_T")


def as_caller(
    request: HttpRequest, principal: Principal, work: Callable[[], _T]
) -> Callable[[], _T]:
    """`work`, done in the caller's tenant scope and told to the audit trail as the caller's."""

    def run() -> _T:
        request.user = principal  # type: ignore[assignment]  # as Django REST framework does
        with tenant_scope(principal.tenant.id), request_origin(request, request_id_of(request)):
            return work()

    return run


def idempotent(
    request: HttpRequest, principal: Principal, body: bytes, write: Callable[[], dict[str, Any]]
) -> Callable[[], HttpResponse]:
    """`write`, as `as_caller`, and its answer; under an Idempotency-Key the first answer again."""
    key = request.headers.get(idempotency.HEADER)

    def answered() -> HttpResponse:
        return JsonResponse(write())

    def kept() -> HttpResponse:
        route = f"{request.method} {request.get_full_path()}"
        try:
            with transaction.atomic():
                attempt = idempotency.begin(
                    route, lambda: body, principal.label, key or "", IdempotencyRecord
                )
                response = answered()
                attempt.end(response)
                return response
        except idempotency.Replay as replay:
            return HttpResponse(
                replay.content,
                status=replay.status,
                content_type="application/json",
                headers={idempotency.REPLAYED_HEADER: "true"},
            )

    return as_caller(request, principal, answered if key is None else kept)


def list_page(
    request: HttpRequest,
    rows: QuerySet[Any],
    write: Callable[[Any], dict[str, Any]],
    *,
    prefix: str,
    max_limit: int = 100,
    default_limit: int = 20,
) -> dict[str, Any]:
    """One page of `rows` in OpenAI's form, newest first or as `order` says.

    Ids are ordered by time (UUID version 7), and `after` is the id of an item.
    """
    limit = _limit(request, default_limit, max_limit)
    order = request.GET.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc.", param="order")
    after = request.GET.get("after")
    if after is not None:
        pk = parse_id(prefix, after)
        if pk is None:
            raise InvalidRequest("after is the id of an item.", param="after")
        rows = rows.filter(pk__gt=pk) if order == "asc" else rows.filter(pk__lt=pk)
    found = list(rows.order_by("pk" if order == "asc" else "-pk")[: limit + 1])
    data = [write(row) for row in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def _limit(request: HttpRequest, default: int, most: int) -> int:
    text = request.GET.get("limit", str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= 6
    if not (is_number and 1 <= int(text) <= most):
        raise InvalidRequest(f"limit is a number from 1 to {most}.", param="limit")
    return int(text)
