"""Views of /v1 that read and write rows: Django REST framework's, run in a thread as the caller.

`gateway_view` does the parts that they share with the rest of /v1 (headers, errors, the caller's
key) around the thread; a view in the thread raises ApiError and the database's errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from drf_spectacular.openapi import AutoSchema
from rest_framework.authentication import BaseAuthentication
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.openapi import KEY_ONLY
from controlplane.gateway.rest.views import RowAPIView
from controlplane.inference.bodies import Body
from controlplane.inference.parsing import parse_body
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenants import idempotency
from controlplane.tenants.auth import Permission, Principal
from controlplane.tenants.models import IdempotencyRecord

_B = TypeVar("_B", bound=Body)


class _KnownCaller(BaseAuthentication):
    """Find the caller that was let in before the thread began (`GatewayRequest.as_caller`)."""

    def authenticate(self, request: Request) -> tuple[Principal, Principal]:
        principal = request._request.user
        assert isinstance(principal, Principal)
        return principal, principal


class _JsonAlone(BaseContentNegotiation):
    """Read and write JSON, whatever the Accept and Content-Type headers say."""

    def select_parser(self, request: Request, parsers: Any) -> Any:
        return parsers[0]

    def select_renderer(
        self, request: Request, renderers: Any, format_suffix: str | None = None
    ) -> Any:
        return renderers[0], renderers[0].media_type


class _GatewayJSONRenderer(JSONRenderer):
    """Write the bytes that JsonResponse writes for the rest of /v1."""

    compact, ensure_ascii = False, True


class _GatewaySchema(AutoSchema):  # type: ignore[misc]
    def get_tags(self) -> list[str]:
        return ["gateway"]

    def get_auth(self) -> list[dict[str, list[str]]]:
        return KEY_ONLY

    def _get_request_body(self, direction: str = "request") -> Any:
        body = super()._get_request_body(direction)
        return body and {**body, "required": True}


class GatewayAPIView(RowAPIView):
    """A view of rows that runs in its caller's scope.

    `permissions` names the methods that there are, and what each needs.
    """

    permissions: ClassVar[Mapping[str, Permission]] = {}
    #: Runs the view in a thread, and answers for the database's failures.
    run_in_thread: ClassVar[Any] = staticmethod(query_in_thread)

    authentication_classes = (_KnownCaller,)
    content_negotiation_class = _JsonAlone
    renderer_classes = (_GatewayJSONRenderer,)
    schema = _GatewaySchema()

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        view = super().as_view(**initkwargs)

        @functools.wraps(view)
        async def served(request: GatewayRequest, **kwargs: Any) -> HttpResponseBase:
            work = request.as_caller(lambda: view(request.http, **kwargs))
            return await cls.answered(request, work)

        return gateway_view(cls.permissions)(served)

    @classmethod
    async def answered(
        cls, request: GatewayRequest, work: Callable[[], HttpResponseBase]
    ) -> HttpResponseBase:
        """Run the view."""
        response: HttpResponseBase = await cls.run_in_thread(work)
        return response

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        response = super().dispatch(request, *args, **kwargs)
        assert isinstance(response, HttpResponse)
        # A plain response: Django would take one more thread to render what is rendered already.
        return HttpResponse(response.content, status=response.status_code, headers=response.headers)

    def handle_exception(self, exc: Exception) -> Response:
        if isinstance(exc, idempotency.Replay):
            return exc.response
        raise exc  # for `gateway_view`, and for `query_in_thread`

    @property
    def default_response_headers(self) -> dict[str, str]:
        return {}

    @property
    def principal(self) -> Principal:
        principal = self.request.auth
        assert isinstance(principal, Principal)
        return principal

    @functools.cached_property
    def sent(self) -> bytes:
        return self.request._request.read()  # `body` has a smaller bound of its own

    def body_of_write(self, kind: type[_B]) -> _B:
        """Check the body and begin a write that an Idempotency-Key may name.

        Raises InvalidRequest, and Replay when the caller sent this write before.
        """
        body = parse_body(kind, self.sent)
        self.begin_attempt(self.request, self.principal.label, IdempotencyRecord)
        return body
