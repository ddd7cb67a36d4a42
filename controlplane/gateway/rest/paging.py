"""Lists, page by page, in OpenAI's form: `after` names the item that the page begins behind."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from drf_spectacular.utils import OpenApiParameter, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.gateway.rest.fields import Constant
from controlplane.tenancy.public_ids import parse_id

_M = TypeVar("_M", bound=Model)
_Serializer = serializers.Serializer[Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The query parameters of a list, and their bounds."""

    default_limit: int = 20
    max_limit: int = 100
    #: Prefix of the ids that `after` takes; None: they are plain UUIDs.
    id_prefix: str | None = None
    #: True if the client may ask for the oldest items first.
    has_order: bool = False

    def parameters(self) -> list[OpenApiParameter]:
        """Return the parameters, for the OpenAPI document."""
        bounds = {"minimum": 1, "maximum": self.max_limit, "default": self.default_limit}
        limit = {"type": "integer", **bounds}
        order = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
        found = [
            OpenApiParameter("after", str, description="The `last_id` of the page before."),
            OpenApiParameter("limit", limit, description="Number of items on a page."),
            OpenApiParameter("order", order, description="The order by creation time."),
        ]
        return found if self.has_order else found[:2]

    def limit(self, request: Request) -> int:
        """Return the length of the page. Raises InvalidRequest."""
        text = request.query_params.get("limit", str(self.default_limit))
        is_number = text.isascii() and text.isdigit() and len(text) <= 6
        if not (is_number and 1 <= int(text) <= self.max_limit):
            raise InvalidRequest(
                f"limit must be a number from 1 to {self.max_limit}.", param="limit"
            )
        return int(text)


NEWEST_FIRST = Paging()
PAGE_PARAMETERS = NEWEST_FIRST.parameters()


def page(
    request: Request,
    rows: QuerySet[_M],
    serializer: type[_Serializer],
    *,
    paging: Paging = NEWEST_FIRST,
    cursor: str = "id",
) -> Response:
    """Answer with one page of `rows`, newest first or as `order` says.

    The cursor is an id: ids are ordered by time (UUID version 7).

    cursor  the serializer's field that has it
    """
    limit = paging.limit(request)
    order = request.query_params.get("order", "desc") if paging.has_order else "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    after = request.query_params.get("after")
    if after is not None:
        pk = parse_id(paging.id_prefix, after) if paging.id_prefix else _uuid(after)
        if pk is None:
            raise InvalidRequest("after must be the id of an item.", param="after")
        rows = rows.filter(pk__gt=pk) if order == "asc" else rows.filter(pk__lt=pk)
    found = list(rows.order_by("pk" if order == "asc" else "-pk")[: limit + 1])
    data = list(serializer(found[:limit], many=True).data)
    return _list(data, cursor, has_more=len(found) > limit)


def page_of_items(
    request: Request, items: Sequence[Any], serializer: type[_Serializer], *, cursor: str
) -> Response:
    """Answer with one page of items that are not rows, in their order.

    cursor  the serializer's field that names each
    """
    limit = NEWEST_FIRST.limit(request)
    data = list(serializer(items, many=True).data)
    after = request.query_params.get("after")
    if after is not None:
        places = [place for place, row in enumerate(data) if row[cursor] == after]
        if not places:
            raise InvalidRequest("after must be the id of an item.", param="after")
        data = data[places[0] + 1 :]
    return _list(data[:limit], cursor, has_more=len(data) > limit)


def _list(data: list[Any], cursor: str, *, has_more: bool) -> Response:
    return Response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0][cursor] if data else None,
            "last_id": data[-1][cursor] if data else None,
            "has_more": has_more,
        }
    )


def page_of(serializer: type[_Serializer]) -> _Serializer:
    """Return the form of `page`'s answer, for the OpenAPI document."""
    name = serializer.__name__.removesuffix("Serializer")
    form: _Serializer = inline_serializer(
        f"{name}List",
        {
            "object": Constant("list"),
            "data": serializer(many=True),
            "first_id": serializers.CharField(allow_null=True),
            "last_id": serializers.CharField(allow_null=True),
            "has_more": serializers.BooleanField(),
        },
    )
    return form


def _uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None
