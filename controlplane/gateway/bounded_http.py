"""uvicorn's HTTP protocol, with bounds on what a client sends and on how slowly.

    connection   number of one address, and of all
    head         bytes of the request line, bytes and number of headers; seconds
    body         progress while somebody reads it
    trailers     dropped: a header after the body has no effect
    answer       progress while there is something to send

httptools has no such bounds: it joins the pieces of a header as long as they come, which blocks the
whole process. `controlplane.serve` starts the server with this class.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import http
import ipaddress
import json
import logging
import resource
import time
from collections import Counter
from typing import Any, ClassVar

import httptools
from django.conf import settings
from uvicorn.config import Config
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr

MAX_TARGET_BYTES = 8 * 1024
MAX_HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
#: Seconds from the first byte of a request, or the connection, to the end of its headers.
HEAD_S = 12.0
#: Seconds of a window. In each a body must bring MIN_WINDOW_BYTES, unless nobody reads it.
BODY_WINDOW_S = 30.0
MIN_WINDOW_BYTES = 16 * 1024
#: Seconds for which the rest of a body is read after an early answer.
LEFTOVER_S = 12.0
#: Seconds within which a client must read some more of its answer.
WRITE_S = 120.0
#: Chunk sizes, their extensions and trailers between two pieces of a body.
MAX_FRAMING_BYTES = 32 * 1024
#: Number of a body's chunks that may have any size; beyond it the average chunk must have
#: MIN_CHUNK_BYTES. Each chunk costs a call of the parser: many small ones would block the process.
FREE_CHUNKS = 2048
MIN_CHUNK_BYTES = 256
#: Requests of one connection that may wait for the one before them.
MAX_PIPELINED = 32
#: The parser gets heads in such pieces, so that it never joins much before a check.
_SLICE_BYTES = 16 * 1024
#: Seconds between two checks of a connection, by which the times above may be longer.
_LOOK_S = 2.0
#: Seconds for which a refused connection is still read; without them the refusal may be lost.
_LINGER_S = 1.0
#: Number of refused connections that are read at a time.
_MAX_LINGERING = 64
#: Open files that the process needs beside its clients' connections.
_OWN_FILES = 256
_TELL_S = 60.0

log = logging.getLogger(__name__)


class _Phase(enum.Enum):
    IDLE = enum.auto()  # the request is whole: an answer is under way, or was
    HEAD = enum.auto()
    BODY = enum.auto()


class _Refused(Exception):
    """The request goes beyond a bound. Raised through the parser, which wraps it."""


class Door:
    """Counts the connections of each address. One that a trusted proxy makes is nobody's own."""

    def __init__(self, *, per_address: int, in_all: int, trusted_proxies: list[str] | str) -> None:
        self._per_address = min(per_address or in_all, max(1, in_all // 2))
        self._in_all = in_all
        self._trusted = ProxyHeadersMiddleware(None, trusted_proxies).trusted_hosts  # type: ignore[arg-type]
        self._connected: Counter[str] = Counter()
        self._told_at = -_TELL_S
        self.total = 0

    def enter(self, address: str) -> str | None:
        """Count the connection; return the name it is counted under, None when there is no room."""
        name = "" if not address or address in self._trusted else network_of(address)
        is_full = bool(name) and self._connected.get(name, 0) >= self._per_address
        if is_full or self.total >= self._in_all:
            self._tell(address)
            return None
        self.total += 1
        self._connected[name] += 1
        return name

    def _tell(self, address: str) -> None:
        """Log a refusal once in a while: a flood of connections should not flood the log."""
        if time.monotonic() - self._told_at > _TELL_S:
            self._told_at = time.monotonic()
            log.warning("no room for connections of %s; %d are open", address, self.total)

    def leave(self, name: str) -> None:
        self.total -= 1
        self._connected[name] -= 1
        if not self._connected[name]:
            del self._connected[name]


def network_of(address: str) -> str:
    """Return the addresses of one client: an IPv4 address, or an IPv6 network of 64 bits."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


class BoundedHttp(HttpToolsProtocol):
    """Refuses what goes beyond a bound: answers if the client can still read, and disconnects."""

    _lingering: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = self._is_lingering = False
        self._fault: tuple[int, str, str] | None = None
        self._phase = _Phase.HEAD
        self._since = self.loop.time()  # the phase, or the window of a body
        self._head_bytes = 0  # size of the request line and headers that are read
        self._fed_bytes = 0  # given to the parser in this head: more than it has read
        self._num_headers = 0
        self._window_bytes = self._framing_bytes = 0
        self._body_bytes = self._num_chunks = 0
        self._answered_at: float | None = None
        self._unsent_bytes, self._sent_at = 0, self._since

    # --- connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        client = get_remote_addr(transport)
        self._door = _door(self.config)
        self._place = self._door.enter(client[0] if client else "")
        if self._place is None:
            self.transport = transport
            self._refuse(429, "too_many_connections", "Too many connections from your address.")
            return
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._place is not None:
            self._door.leave(self._place)
        if self._is_lingering:
            BoundedHttp._lingering -= 1
            self._is_lingering = False
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._sent_at = self.loop.time()
        super().resume_writing()

    # --- what comes

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.IDLE and not self._is_answering():
            self._begin_head()
        try:
            start = 0
            while start < len(data):
                is_long_head = self._phase is _Phase.HEAD and len(data) - start > _SLICE_BYTES
                end = start + _SLICE_BYTES if is_long_head else len(data)
                try:
                    self._feed(data[start:end])
                except httptools.HttpParserUpgrade as upgrade:
                    data, start = self._without_upgrade() + data[start + upgrade.args[0] :], 0
                else:
                    start = end
        except (httptools.HttpParserError, _Refused):
            self._refuse(*(self._fault or (400, "invalid_http", "This is no HTTP/1.1 request.")))

    def _without_upgrade(self) -> bytes:
        """Return the head without the wish for another protocol, for a new parser.

        The old one expects no body after such a wish, and Java's client asks for HTTP/2 with its
        first request."""
        if self.parser.get_method() == b"CONNECT":
            self._fail(405, "method_not_allowed", "CONNECT is not allowed here.")
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [
            name + b": " + value
            for name, value in self.headers
            if name not in (b"connection", b"upgrade", b"http2-settings")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self._phase = _Phase.IDLE
        return b"\r\n".join([*lines, b"", b""])

    def _feed(self, data: bytes) -> None:
        self._framing_bytes += len(data)  # back to none where some of it is a body's
        self.parser.feed_data(data)
        if self._phase is _Phase.HEAD:
            self._fed_bytes += len(data)
            if self._fed_bytes > MAX_HEAD_BYTES + _SLICE_BYTES:
                self._fail_head()
        elif self._phase is _Phase.BODY and self._framing_bytes > MAX_FRAMING_BYTES:
            self._fail(400, "invalid_http", "The body's chunks are more frame than body.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not _Phase.HEAD:
            self._begin_head()
        self._fed_bytes = 0

    def _begin_head(self) -> None:
        self._phase, self._since = _Phase.HEAD, self.loop.time()
        self._head_bytes = self._fed_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            self._fail(414, "uri_too_long", f"An address has {MAX_TARGET_BYTES} bytes at most.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._fail_head()
        if self._phase is _Phase.HEAD:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(400, "invalid_http", "Too many requests at once on one connection.")
        super().on_headers_complete()
        self._phase, self._since = _Phase.BODY, self.loop.time()
        self._window_bytes = self._framing_bytes = self._body_bytes = self._num_chunks = 0
        self._answered_at = None

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            self._fail(
                400,
                "chunks_too_small",
                f"Beyond {FREE_CHUNKS} chunks a body's chunks have {MIN_CHUNK_BYTES} bytes on "
                "average, or more: send larger ones, or a Content-Length.",
            )

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._window_bytes += len(body)
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase = _Phase.IDLE
        super().on_message_complete()

    def _fail_head(self) -> None:
        self._fail(
            431,
            "headers_too_large",
            f"A request may have {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes in all.",
        )

    def _fail(self, status: int, code: str, message: str) -> None:
        self._fault = (status, code, message)
        raise _Refused

    # --- time

    def _look(self) -> None:
        """Every `_LOOK_S`: end what takes too long."""
        now = self.loop.time()
        self._look_at_answer(now)
        if not self._is_refused:
            if self._phase is _Phase.HEAD:
                self._look_at_head(now)
            elif self._phase is _Phase.BODY:
                self._look_at_body(now)
        self._timer = self.loop.call_later(_LOOK_S, self._look)

    def _look_at_answer(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent_bytes:
            self._sent_at = now
        elif now - self._sent_at > WRITE_S:
            self.transport.abort()
        self._unsent_bytes = unsent

    def _look_at_head(self, now: float) -> None:
        if now - self._since <= HEAD_S:
            return
        if self._is_answering() and not self.pipeline:
            self.cycle.keep_alive = False  # the answer before it may take its time
        elif not self._fed_bytes:
            self.transport.close()  # nobody asked for anything
        else:
            self._refuse(408, "request_timeout", "The headers did not arrive in time.")

    def _look_at_body(self, now: float) -> None:
        if self.cycle.response_complete:
            self._answered_at = self._answered_at or now
            if now - self._answered_at > LEFTOVER_S:
                self.transport.close()
        elif self.flow.read_paused:
            self._since, self._window_bytes = now, 0
        elif now - self._since > BODY_WINDOW_S:
            if self._window_bytes < MIN_WINDOW_BYTES:
                self._refuse(408, "request_timeout", "The body did not arrive in time.")
            self._since, self._window_bytes = now, 0

    # --- refusals

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, unless another answer has begun, and end the connection."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self.pipeline or (self._is_answering() and self._has_begun_other()):
            self.transport.close()
            return
        if self._is_answering():  # it is the application that waits for the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(refusal(status, code, message, self.server_state.default_headers))
        self._end_softly()

    def _has_begun_other(self) -> bool:
        """Return whether another answer has begun, or is to be sent before this one."""
        return self.cycle.response_started or self._phase is not _Phase.BODY

    def _end_softly(self) -> None:
        """Close after the client had time to read, so that no reset overtakes the answer."""
        if BoundedHttp._lingering >= _MAX_LINGERING or not self.transport.can_write_eof():
            self.transport.close()
            return
        BoundedHttp._lingering += 1
        self._is_lingering = True
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)


def refusal(
    status: int, code: str, message: str, default_headers: list[tuple[bytes, bytes]]
) -> bytes:
    """Write a whole HTTP answer with an error in OpenAI's form, as `controlplane.errors` does."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in default_headers]
    lines += [b"content-type: application/json", b"connection: close"]
    lines += [b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


@functools.cache
def _door(config: Config) -> Door:
    """Return the one counter of the server's connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = 1 << 20
    return Door(
        per_address=settings.MAX_CONNECTIONS_PER_ADDRESS,
        in_all=max(files // 2, files - _OWN_FILES),
        trusted_proxies=config.forwarded_allow_ips,
    )
