"""What every view of /api shares: the tenant scope, permissions, bounded bodies, pages."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, Any, ClassVar, TypeVar, cast

from django.conf import settings
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponseBase
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter, inline_serializer
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.errors import InvalidRequest, PayloadTooLarge, PermissionDenied
from controlplane.infra import finite_json
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import idempotency
from controlplane.tenants.auth import Permission, Principal, authorize
from controlplane.tenants.models import IdempotencyRecord, KeptAnswer

MAX_BODY_BYTES = 256 * 1024
DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 20, 100

_M = TypeVar("_M", bound=Model)
_Serializer = serializers.Serializer[Any]


class BoundedJSONParser(JSONParser):
    """JSON of at most `MAX_BODY_BYTES`, whatever its nesting; its numbers are finite."""

    strict = False  # NaN is found below, where its place is told

    def parse(
        self,
        stream: Any,
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        bounded = cast(IO[Any], _Bounded(stream))
        try:
            body = super().parse(bounded, media_type, parser_context)
            finite_json.check_value(body)
        except RecursionError as error:
            raise ParseError("JSON parse error - nested too deeply") from error
        return body


class _Bounded:
    """A stream that raises PayloadTooLarge instead of giving more than `MAX_BODY_BYTES`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left = MAX_BODY_BYTES

    def read(self, size: int = -1) -> bytes:
        wanted = self._left + 1 if size < 0 else min(size, self._left + 1)
        data: bytes = self._stream.read(wanted)
        self._left -= len(data)
        if self._left < 0:
            raise PayloadTooLarge(f"The body is longer than {MAX_BODY_BYTES} bytes.")
        return data


class ManagementAPIView(APIView):
    """A view whose answer is rendered inside its scope, and whose POSTs may name a key.

    What surrounds the answer is entered into `_scope`, which is left when it is rendered.
    """

    permission_classes = (IsAuthenticated,)
    parser_classes = (BoundedJSONParser,)

    _scope: contextlib.ExitStack
    _attempt: idempotency.Attempt | None = None

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        with contextlib.ExitStack() as self._scope:
            response = super().dispatch(request, *args, **kwargs)
            if isinstance(response, Response):
                response.render()  # now, since it may still read rows
            if self._attempt is not None:
                self._attempt.end(response)
        return response

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, idempotency.Replay):
            return exc.response
        return super().handle_exception(exc)

    def begin_attempt(self, request: Request, caller: str, kept_in: type[KeptAnswer]) -> None:
        """To be called once the caller may do this. Raises Replay when they did it before."""
        key = request.headers.get(idempotency.HEADER)
        if key is not None and request.method == "POST":
            self._scope.enter_context(transaction.atomic())
            self._attempt = idempotency.begin(request, caller, key, kept_in)


class TenantAPIView(ManagementAPIView):
    """A view that runs in its caller's tenant scope, from authentication to the rendered answer.

    `permissions` names what each method needs; reading needs READ. A method that writes and is
    not named there is refused to everybody.
    """

    permissions: ClassVar[Mapping[str, Permission]] = {}

    def check_permissions(self, request: Request) -> None:
        super().check_permissions(request)
        self._scope.enter_context(tenant_scope(self.principal.tenant.id))
        method = (request.method or "").upper()
        if not hasattr(self, method.lower()):
            return  # answered with 405
        default = Permission.READ if method in {"GET", "HEAD", "OPTIONS"} else None
        asked = "GET" if method == "HEAD" else method  # which it runs
        permission = self.permissions.get(asked, default)
        if permission is None:
            raise PermissionDenied(f"Nobody may {method} here.")
        authorize(self.principal, permission)
        self.begin_attempt(request, self.principal.label, IdempotencyRecord)

    @property
    def principal(self) -> Principal:
        principal = self.request.auth
        assert isinstance(principal, Principal)
        return principal


class StrictSerializer(serializers.Serializer[Any]):
    """A body in which a field nobody reads is an error: it is a typing error of the caller's."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = [name for name in data if name not in self.fields]
            if unknown:
                raise serializers.ValidationError(
                    {str(unknown[0])[:100]: "There is no such field."}
                )
        return super().to_internal_value(data)

    @classmethod
    def parsed(cls, request: Request) -> dict[str, Any]:
        """The request's body, checked. Raises rest_framework's ValidationError."""
        serializer = cls(data=request.data)
        serializer.is_valid(raise_exception=True)
        fields: dict[str, Any] = serializer.validated_data
        return fields


class _KeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "controlplane.tenants.auth.ApiKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "A tenant's API key."}


class _SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = "controlplane.tenants.auth.ConsoleSessionAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        cookie = settings.SESSION_COOKIE_NAME
        return {"type": "apiKey", "in": "cookie", "name": cookie, "description": "The console's."}


PAGE_PARAMETERS = [
    OpenApiParameter("after", str, description="The `last_id` of the page before."),
    OpenApiParameter("limit", int, description=f"1 to {MAX_PAGE_SIZE}, default 20."),
]


def page(
    request: Request, rows: QuerySet[_M], serializer: type[_Serializer], *, cursor: str = "id"
) -> Response:
    """One page of `rows`, newest first, in OpenAI's list form.

    The cursor is an id: they are ordered by time (UUID version 7).

    cursor  the serializer's field that has it
    """
    limit = _limit(request)
    after = request.query_params.get("after")
    if after is not None:
        rows = rows.filter(pk__lt=_uuid(after))
    found = list(rows.order_by("-pk")[: limit + 1])
    data = list(serializer(found[:limit], many=True).data)
    return _list(data, cursor, has_more=len(found) > limit)


def page_of_items(
    request: Request, items: Sequence[Any], serializer: type[_Serializer], *, cursor: str
) -> Response:
    """One page of things that are no rows, in their order, in OpenAI's list form.

    cursor  the serializer's field that names each
    """
    limit = _limit(request)
    data = list(serializer(items, many=True).data)
    after = request.query_params.get("after")
    if after is not None:
        places = [place for place, row in enumerate(data) if row[cursor] == after]
        if not places:
            raise InvalidRequest("after is the id of an item.", param="after")
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
    """The form of `page`'s answer, for the OpenAPI document."""
    name = serializer.__name__.removesuffix("Serializer")
    form: _Serializer = inline_serializer(
        f"{name}List",
        {
            "object": serializers.ChoiceField(["list"]),
            "data": serializer(many=True),
            "first_id": serializers.CharField(allow_null=True),
            "last_id": serializers.CharField(allow_null=True),
            "has_more": serializers.BooleanField(),
        },
    )
    return form


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_PAGE_SIZE))
    is_number = text.isascii() and text.isdigit() and len(text) <= 4
    if not (is_number and 1 <= int(text) <= MAX_PAGE_SIZE):
        raise InvalidRequest(f"limit is a number from 1 to {MAX_PAGE_SIZE}.", param="limit")
    return int(text)


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError as error:
        raise InvalidRequest("after is the id of an item.", param="after") from error
