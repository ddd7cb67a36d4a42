"""The ASGI handler of /v1: no middleware, and a bound on the body before it is read.

Sessions, CSRF and the like mean nothing to a request with an API key, and each synchronous
middleware would cost it a switch of threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.exception import convert_exception_to_response

from controlplane.errors import PayloadTooLarge

MAX_BODY_BYTES = 8 * 1024 * 1024

Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]


class _TooLong(Exception):
    """The body is longer than it may be."""


class GatewayHandler(ASGIHandler):
    """Django's handler, reduced to URL resolution and views."""

    def load_middleware(self, is_async: bool = False) -> None:
        assert is_async
        self._view_middleware: list[Any] = []
        self._template_response_middleware: list[Any] = []
        self._exception_middleware: list[Any] = []
        self._middleware_chain = convert_exception_to_response(
            self._get_response_async  # type: ignore[attr-defined]  # django-stubs leave it out
        )

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        left = MAX_BODY_BYTES

        async def bounded() -> Event:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLong
            return message

        try:
            if not declared.isdigit() or int(declared[:20]) > MAX_BODY_BYTES:
                raise _TooLong
            await super().__call__(scope, bounded, send)
        except _TooLong:
            await _refuse(send)


async def _refuse(send: Send) -> None:
    response = PayloadTooLarge(f"A body may have {MAX_BODY_BYTES} bytes at most.").response()
    headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
    # The rest of the body is on its way; nobody will read it.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.content})
