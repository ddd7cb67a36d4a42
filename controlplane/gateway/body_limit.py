"""Bound a request's body before anything reads it: its bytes, and the time of unknown callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from controlplane.errors import ApiError, PayloadTooLarge, RequestTimeout

Event = Mapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

#: How long a body is read before its sender is known.
STRANGERS_S = 14.0


class BodyLimit:
    """An ASGI application that answers 413 to a longer body, and passes others on.

    A body that takes longer than `STRANGERS_S` is read on for callers that `is_known` accepts, and
    answered with 408 otherwise. (`controlplane.gateway.bounded_http` demands progress of all.)

    Without it Django's handler would write any body to disk before its first middleware runs.
    """

    def __init__(
        self,
        application: Application,
        *,
        max_bytes: int,
        is_known: Callable[[dict[str, Any]], Awaitable[bool]],
    ) -> None:
        self._application = application
        self._max_bytes = max_bytes
        self._is_known = is_known

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        left = self._max_bytes
        patient = _Patient(receive, lambda: self._is_known(scope))

        async def bounded() -> Event:
            nonlocal left
            message = await patient.receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_long()
            return message

        try:
            if not declared.isdigit() or int(declared[:20]) > self._max_bytes:
                raise self._too_long()
            await self._application(scope, bounded, send)
        except (PayloadTooLarge, RequestTimeout) as error:
            # The rest of the body is on its way; nobody will read it.
            await send_error(send, error, (b"connection", b"close"))

    def _too_long(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"A body may have {self._max_bytes} bytes at most.")


class _Patient:
    """`receive` with a time limit for unknown callers. Raises RequestTimeout."""

    def __init__(self, receive: Receive, is_known: Callable[[], Awaitable[bool]]) -> None:
        self._receive = receive
        self._is_known = is_known
        #: None when the limit has ended: the body is whole, or its sender known.
        self._until: float | None = asyncio.get_running_loop().time() + STRANGERS_S

    async def receive(self) -> Event:
        if self._until is None:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            await self._ask()
            return await self._receive()
        if not message.get("more_body", False):
            self._until = None
        elif asyncio.get_running_loop().time() > self._until:
            await self._ask()
        return message

    async def _ask(self) -> None:
        if not await self._is_known():
            raise RequestTimeout("The body did not arrive in time.")
        self._until = None


async def send_error(send: Send, error: ApiError, *more: tuple[bytes, bytes]) -> None:
    """Send the error's answer, with `more` headers, from outside Django."""
    response = error.response()
    headers = [(name.lower().encode(), value.encode()) for name, value in response.items()]
    headers += [(b"content-length", str(len(response.content)).encode()), *more]
    start = {"type": "http.response.start", "status": response.status_code, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.content})
