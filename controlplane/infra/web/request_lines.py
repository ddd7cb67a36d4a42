"""One log line for each HTTP request, written when its answer has ended, and its ids.

A request has two ids: `request_id` is ours and unique, `client_request_id` is what its client
called it. Both are in every line of the request and in the answer's headers.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import structlog
from django.http import HttpRequest, HttpResponseBase

log = logging.getLogger("controlplane.requests")

#: Headers with a client's own id; the first is OpenAI's.
CLIENT_HEADERS = ("X-Client-Request-Id", "X-Request-Id")
#: Ids that are taken over: UUIDs, ULIDs, trace ids. Others are ignored.
_CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:;/=+@-]{0,127}", re.ASCII)
#: Paths that monitors request every few seconds.
QUIET_ROUTES = frozenset(("/healthz", "/readyz", "/metrics"))

Fields = dict[str, Any]


def client_request_id(request: HttpRequest) -> str | None:
    """Return the client's own id of the request; None without a valid one."""
    for name in CLIENT_HEADERS:
        if _CLIENT_ID.fullmatch(request.headers.get(name, "")):
            return str(request.headers[name])
    return None


class RequestLine:
    """The line of one request. Binds its ids for all lines of the current task or thread.

        with RequestLine(request, request_id) as line:
            response = …
        line.end_with(response)

    code  of the error that the answer has
    """

    def __init__(self, request: HttpRequest, request_id: str) -> None:
        self.request_id = request_id
        self.client_request_id = client_request_id(request)
        self.code: str | None = None
        self._request = request
        self._began = time.monotonic()
        self._fields: Fields = {"request_id": request_id}
        if self.client_request_id is not None:
            self._fields["client_request_id"] = self.client_request_id
        self._later: Callable[[float], Fields] | None = None
        self._is_written = False
        request.line = self  # type: ignore[attr-defined]
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(**self._fields)

    def add(self, **fields: Any) -> None:
        """Add fields to this line, and to all lines before it."""
        self._fields |= fields
        structlog.contextvars.bind_contextvars(**fields)

    def add_later(self, fields: Callable[[float], Fields]) -> None:
        """Add fields that are computed when the line is written; they may set `outcome`.

        fields  gets the moment at which the request came, in seconds of time.monotonic
        """
        self._later = fields

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):  # the client has left
            self._write(None, "client_left")

    def end_with(self, response: HttpResponseBase) -> None:
        """Set the ids' headers; write the line now, or when a streamed answer has ended."""
        response["X-Request-Id"] = self.request_id
        if self.client_request_id is not None:
            response["X-Client-Request-Id"] = self.client_request_id
        status = response.status_code
        outcome = "failed" if status >= 500 else "refused" if status >= 400 else "ok"
        if response.streaming:
            closers: list[Callable[[], None]] = response._resource_closers  # type: ignore[attr-defined]
            closers.append(lambda: self._write(status, outcome))
        else:
            self._write(status, outcome)

    @property
    def route(self) -> str:
        """Return the pattern, not the path: paths have ids, and tokens of invites."""
        match = getattr(self._request, "resolver_match", None)
        return f"/{match.route}" if match is not None else ""

    def _write(self, status: int | None, outcome: str) -> None:
        if self._is_written or self.route in QUIET_ROUTES or not log.isEnabledFor(logging.INFO):
            return
        self._is_written = True
        extra = self._fields | {
            "method": self._request.method,
            "route": self.route,
            "status": status,
            "outcome": outcome,
            "duration_ms": round((time.monotonic() - self._began) * 1000, 1),
        }
        if self.code:
            extra["code"] = self.code
        if self._later is not None:
            extra |= self._later(self._began)
        log.info("request", extra=extra)


def line_of(request: HttpRequest) -> RequestLine | None:
    line: RequestLine | None = getattr(request, "line", None)
    return line


def note(request: HttpRequest, **fields: Any) -> None:
    """Add fields to the request's line, if it has one."""
    if (line := line_of(request)) is not None:
        line.add(**fields)
