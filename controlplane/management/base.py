"""The base of all views of /api: the tenant scope, permissions, bounded bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, ClassVar, cast

from django.conf import settings
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request

from controlplane.errors import InvalidRequest, PayloadTooLarge, PermissionDenied
from controlplane.gateway.rest.views import RowAPIView
from controlplane.infra import finite_json
from controlplane.infra.web.request_lines import note
from controlplane.tenants.auth import Permission, Principal, authorize, caller_scope
from controlplane.tenants.models import IdempotencyRecord

MAX_BODY_BYTES = 256 * 1024


class BoundedJSONParser(JSONParser):
    """A parser of JSON of at most `max_bytes`, any nesting, and finite numbers."""

    max_bytes = MAX_BODY_BYTES
    strict = False  # NaN is found below, which names its place

    def parse(
        self,
        stream: Any,
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        bounded = cast(IO[Any], _Bounded(stream, self.max_bytes))
        try:
            body = super().parse(bounded, media_type, parser_context)
            finite_json.check_value(body)
        except RecursionError as error:
            raise ParseError("JSON parse error - nested too deeply") from error
        return body


class _Bounded:
    """A stream that raises PayloadTooLarge instead of giving more than `max_bytes`."""

    def __init__(self, stream: Any, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = self._left = max_bytes

    def read(self, size: int = -1) -> bytes:
        wanted = self._left + 1 if size < 0 else min(size, self._left + 1)
        data: bytes = self._stream.read(wanted)
        self._left -= len(data)
        if self._left < 0:
            raise PayloadTooLarge(f"The body is longer than {self._max_bytes} bytes.")
        return data


class ManagementAPIView(RowAPIView):
    """A view whose bodies are JSON of bounded length."""

    permission_classes = (IsAuthenticated,)
    parser_classes = (BoundedJSONParser,)


class TenantAPIView(ManagementAPIView):
    """A view that runs in its caller's scope, from authentication to the rendered answer.

    `permissions` names the permission of each method; reading needs READ. A writing method that is
    not named there is refused to everybody.
    """

    permissions: ClassVar[Mapping[str, Permission]] = {}

    def check_permissions(self, request: Request) -> None:
        super().check_permissions(request)
        self._scope.enter_context(caller_scope(self.principal))
        note(request._request, **self.principal.log_fields)
        method = (request.method or "").upper()
        if not hasattr(self, method.lower()):
            return  # answered with 405
        default = Permission.READ if method in {"GET", "HEAD", "OPTIONS"} else None
        asked = "GET" if method == "HEAD" else method  # HEAD runs GET
        permission = self.permissions.get(asked, default)
        if permission is None:
            raise PermissionDenied(f"{method} is not allowed here.")
        authorize(self.principal, permission)
        self.begin_attempt(request, self.principal.label, IdempotencyRecord)

    @property
    def principal(self) -> Principal:
        principal = self.request.auth
        assert isinstance(principal, Principal)
        return principal


#: The parameter of deletions of objects that others may use.
FORCE = OpenApiParameter(
    "force", bool, description="First end its users: delete schedules, cancel training runs."
)


def is_forced(request: Request) -> bool:
    """Return the value of `force`. Raises InvalidRequest for one that is neither true nor false."""
    return flag(request, "force")


def flag(request: Request, name: str) -> bool:
    """Return a query parameter's value; without it False. Raises InvalidRequest."""
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return text == "true"


class StrictSerializer(serializers.Serializer[Any]):
    """A body in which an unknown field is an error, because it is a caller's typing error."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = [name for name in data if name not in self.fields]
            if unknown:
                raise serializers.ValidationError(
                    {str(unknown[0])[:100]: "There is no such field: remove it."}
                )
        return super().to_internal_value(data)

    @classmethod
    def parsed(cls, request: Request) -> dict[str, Any]:
        """Return the checked body of the request. Raises rest_framework's ValidationError."""
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
