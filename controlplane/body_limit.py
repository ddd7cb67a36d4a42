"""A bound on a request's body, before anything reads it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from controlplane.errors import PayloadTooLarge

Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class _TooLong(Exception):
    """The body is longer than it may be."""


class BodyLimit:
    """An ASGI application that answers 413 to a longer body, and passes others on.

    Django's own handler would write any body to disk before its first middleware runs.
    """

    def __init__(self, application: Application, *, max_bytes: int) -> None:
        self._application = application
        self._max_bytes = max_bytes

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        left = self._max_bytes

        async def bounded() -> Event:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _TooLong
            return message

        try:
            if not declared.isdigit() or int(declared[:20]) > self._max_bytes:
                raise _TooLong
            await self._application(scope, bounded, send)
        except _TooLong:
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        error = PayloadTooLarge(f"A body may have {self._max_bytes} bytes at most.")
        response = error.response()
        headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
        # The rest of the body is on its way; nobody will read it.
        headers.append((b"connection", b"close"))
        start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": response.content})
