"""The ASGI handler of /v1: Django without middleware.

Sessions, CSRF and the like mean nothing to a request with an API key, and each synchronous
middleware would cost it a switch of threads.
"""

from __future__ import annotations

from typing import Any

from django.core.handlers.exception import convert_exception_to_response

from controlplane.gateway.gzip_answers import GzipHandler

#: A context's worth of text, many times over.
MAX_BODY_BYTES = 8 * 1024**2


class GatewayHandler(GzipHandler):
    """Django's handler, reduced to URL resolution and views."""

    def load_middleware(self, is_async: bool = False) -> None:
        assert is_async
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        self._middleware_chain = convert_exception_to_response(
            self._get_response_async  # type: ignore[attr-defined]  # django-stubs leave it out
        )
