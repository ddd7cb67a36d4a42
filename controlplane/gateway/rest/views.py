"""Views of rows: the scope of the answer, and the Idempotency-Key of a write."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, ClassVar

from django.core.exceptions import RequestDataTooBig
from django.db import transaction
from django.http import HttpRequest, HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.errors import PayloadTooLarge
from controlplane.tenants import idempotency
from controlplane.tenants.models import KeptAnswer


class RowAPIView(APIView):
    """Render the answer inside its scope, and keep it when the caller sent an Idempotency-Key.

    `_scope` holds the context managers around the answer; it is left once the answer is rendered.
    """

    #: Methods that take an Idempotency-Key.
    kept_methods: ClassVar[tuple[str, ...]] = ("POST",)
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
        """Begin a write. Call this after the permission check.

        Raises Replay when the same caller sent the same write before.
        """
        key = request.headers.get(idempotency.HEADER)
        if key is not None and request.method in self.kept_methods:
            route = f"{request.method} {request.get_full_path()}"
            self._scope.enter_context(transaction.atomic())
            self._attempt = idempotency.begin(route, lambda: self.sent, caller, key, kept_in)

    @functools.cached_property
    def sent(self) -> bytes:
        """Return the bytes of the body. Raises PayloadTooLarge."""
        try:
            return self.request._request.body
        except RequestDataTooBig as error:
            raise PayloadTooLarge(
                f"The body is too large for {idempotency.HEADER}: leave the header out."
            ) from error
