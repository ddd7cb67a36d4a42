"""Call addresses that a tenant names; the control plane calls them only with this module.

The rules are in `outbound_policy`. A host's name is resolved once; all its addresses are checked;
the connection goes to a checked address itself, so a resolver that changes its answer cannot lead
it elsewhere. The certificate is verified for the name. Nothing comes from the environment (proxies,
netrc). Nothing is decompressed. Time and bytes are bounded at the socket, headers included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urljoin

from certifi import where as usual_authorities
from django.conf import settings
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.response import HTTPResponse

from controlplane.infra.metrics import OUTBOUND_CALLS
from controlplane.infra.outbound.outbound_policy import (
    MAX_URL_CHARS,
    Destination,
    OutboundPolicy,
    Refused,
)

MAX_HEADER_BYTES = 32 * 1024
MAX_REDIRECTS = 3
#: Number of a host's addresses that are tried.
_MAX_TRIES = 3
_PIECE = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_USER_AGENT = "Lorikeet"

Resolver = Callable[[str, int], Sequence[str]]


class CallFailed(Exception):
    """An allowed call that did not succeed; the message is for the tenant."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one call, redirects included."""

    #: Time to resolve the name, and then to reach an address.
    connect_s: float = 5.0
    total_s: float = 10.0
    #: Time to the end of the answer's header; None: `total_s`.
    header_s: float | None = None
    #: Time without a byte of the body; None: `total_s`.
    idle_s: float | None = None
    #: Least average pace of the body, after `idle_s`.
    least_bytes_per_s: float = 0.0
    max_url_chars: int = MAX_URL_CHARS
    #: Largest length of the answer's body.
    max_bytes: int = 64 * 1024


class Answer:
    """An answer whose header has been read."""

    def __init__(self, response: HTTPResponse, max_bytes: int) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._max_bytes = max_bytes

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it was sent. Raises CallFailed, also for a body that is too long."""
        if self.headers.get("Content-Encoding", "identity") != "identity":
            raise CallFailed("The answer is compressed: serve it without Content-Encoding.")
        num_bytes = 0
        with _failures():
            while piece := self._response.read(_PIECE, decode_content=False):
                num_bytes += len(piece)
                if num_bytes > self._max_bytes:
                    raise CallFailed(f"The answer is longer than {self._max_bytes} bytes.")
                yield piece

    def read(self) -> bytes:
        return b"".join(self.pieces())


def system_resolver(host: str, port: int) -> list[str]:
    """Return the addresses of a host, as the machine's resolver gives them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def check(url: str, *, resolver: Resolver = system_resolver) -> Destination:
    """Return the parsed URL, if its host may be called now. Raises Refused."""
    policy: OutboundPolicy = settings.OUTBOUND
    destination = policy.destination(url)
    try:
        _addresses(destination, policy, resolver, Bounds().connect_s)
    except CallFailed as error:
        raise Refused("The host has no public address.") from error
    return destination


@contextlib.contextmanager
def call(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    bounds: Bounds = Bounds(),  # frozen
    redirects: int = 0,
    resolver: Resolver = system_resolver,
) -> Iterator[Answer]:
    """Make the call; close its connection at the end of the block.

    redirects  of a GET: how many are followed, at most MAX_REDIRECTS; each is checked as the
               first address is, and another host gets no header Authorization


    Raises Refused for an address that may not be called, CallFailed when there is no answer.
    """
    began_at = time.monotonic()
    sent = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", **(headers or {})}
    left = min(redirects, MAX_REDIRECTS) if method == "GET" else 0
    policy: OutboundPolicy = settings.OUTBOUND
    destination = None
    with contextlib.ExitStack() as stack:
        while True:
            came_from, destination = (
                destination,
                policy.destination(url, max_chars=bounds.max_url_chars),
            )
            if came_from is not None and _site(came_from) != _site(destination):
                sent.pop("Authorization", None)
            with _counted():
                connection, meter = _connect(destination, policy, resolver, bounds, began_at)
                stack.callback(connection.close)
                response = _send(connection, method, destination, sent, body)
            location = response.headers.get("Location", "")
            if not (left and response.status in _REDIRECTS and location):
                break
            left -= 1
            try:
                url = urljoin(destination.url, location)
            except ValueError as error:
                raise Refused("It redirects to something that is not a URL.") from error
        meter.body_begins()
        yield Answer(response, bounds.max_bytes)


def _site(destination: Destination) -> tuple[str, str, int]:
    return destination.scheme, destination.host, destination.port


def _addresses(
    destination: Destination, policy: OutboundPolicy, resolver: Resolver, timeout_s: float
) -> list[str]:
    """Return the host's addresses. Raises Refused unless all may be called, CallFailed for none."""
    if destination.address is not None:
        return [str(destination.address)]
    found = _resolved(destination, resolver, timeout_s)
    if not found:
        raise CallFailed("The host has no public address.")
    for text in found:
        try:
            address = ipaddress.ip_address(text)
        except ValueError as error:
            raise Refused("The host has no public address.") from error
        policy.check_address(address, destination.port)
    return found


def _resolved(destination: Destination, resolver: Resolver, timeout_s: float) -> list[str]:
    """Ask the resolver, which has no time limit of its own, in a thread."""
    found: list[str] = []

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(dict.fromkeys(resolver(destination.host, destination.port)))

    thread = threading.Thread(target=resolve, name="outbound-resolver", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return [] if thread.is_alive() else found


def _connect(
    destination: Destination,
    policy: OutboundPolicy,
    resolver: Resolver,
    bounds: Bounds,
    began_at: float,
) -> tuple[HTTPConnection, _Meter]:
    meter = _Meter(bounds, began_at)
    addresses = _addresses(destination, policy, resolver, min(bounds.connect_s, meter.left_s()))
    problem: Exception | None = None
    for address in addresses[:_MAX_TRIES]:
        connection = _connection(destination, policy, address)
        connection.timeout, connection.meter = min(bounds.connect_s, meter.left_s()), meter
        try:
            with _failures():
                connection.connect()
        except CallFailed as error:
            connection.close()
            problem = error
            continue
        assert isinstance(connection.sock, _Socket | _TlsSocket)
        connection.sock.meter = meter
        return connection, meter
    assert problem is not None
    raise problem


def _connection(destination: Destination, policy: OutboundPolicy, address: str) -> _Pinned:
    """Return a connection to the checked address, a number that nothing resolves again."""
    if destination.scheme == "http":
        return _Http(address, destination.port)
    return _Https(
        address,
        destination.port,
        ssl_context=_tls(policy.ca_file),
        cert_reqs="CERT_REQUIRED",
        server_hostname=destination.host,  # for SNI, and compared with the certificate
    )


def _send(
    connection: HTTPConnection,
    method: str,
    destination: Destination,
    headers: Mapping[str, str],
    body: bytes | None,
) -> HTTPResponse:
    with _failures():
        connection.request(
            method,
            destination.target,
            body=body,
            headers={"Host": destination.authority, **headers},
            preload_content=False,
            decode_content=False,
        )
        response: HTTPResponse = connection.getresponse()
    return response


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn the errors of network, TLS and HTTP into CallFailed."""
    try:
        yield
    except TimeoutError as error:
        raise CallFailed("It did not answer in time.") from error
    except ssl.SSLCertVerificationError as error:
        raise CallFailed(f"Its certificate is not valid: {error.verify_message}.") from error
    except ssl.SSLError as error:
        raise CallFailed("TLS failed.") from error
    except HTTPError as error:
        reason = error.__cause__ or error.__context__
        if isinstance(reason, TimeoutError):
            raise CallFailed("It did not answer in time.") from error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise CallFailed(f"Its certificate is not valid: {reason.verify_message}.") from error
        raise CallFailed("The connection failed.") from error
    except (OSError, HTTPException, ValueError) as error:
        raise CallFailed("The connection failed.") from error


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    try:
        yield
    except Refused:
        OUTBOUND_CALLS.labels("refused").inc()
        raise
    except CallFailed:
        OUTBOUND_CALLS.labels("failed").inc()
        raise
    OUTBOUND_CALLS.labels("answered").inc()


class _Meter:
    """The time and the bytes of header that one connection may still take."""

    def __init__(self, bounds: Bounds, began_at: float) -> None:
        self._bounds = bounds
        self._began_at = began_at
        self._ends_at = began_at + min(bounds.header_s or bounds.total_s, bounds.total_s)
        self._body_at: float | None = None
        self._num_bytes = 0

    def body_begins(self) -> None:
        """Note that the header is read; `Answer` bounds the body's length."""
        self._ends_at = self._began_at + self._bounds.total_s
        self._body_at, self._num_bytes = time.monotonic(), 0

    def left_s(self) -> float:
        """Return the seconds that the next step may take. Raises CallFailed."""
        now = time.monotonic()
        left = self._ends_at - now
        idle_s, pace = self._bounds.idle_s, self._bounds.least_bytes_per_s
        if self._body_at is not None and idle_s is not None:
            left = min(left, idle_s)
            if pace:
                left = min(left, self._body_at + idle_s + self._num_bytes / pace - now)
        if left <= 0:
            raise CallFailed("It did not answer in time.")
        return left

    def count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._body_at is None and self._num_bytes > MAX_HEADER_BYTES:
            raise CallFailed(f"The header is longer than {MAX_HEADER_BYTES} bytes.")


class _Metered:
    """A socket whose reads and writes obey a meter. Without one, its timeout is for each call."""

    meter: _Meter | None = None

    def recv_into(self, *args: Any) -> int:
        if self.meter is None:
            return super().recv_into(*args)  # type: ignore[misc,no-any-return]
        self.settimeout(self.meter.left_s())  # type: ignore[attr-defined]
        num_bytes: int = super().recv_into(*args)  # type: ignore[misc]
        self.meter.count(num_bytes)
        return num_bytes

    def send(self, *args: Any) -> int:
        if self.meter is not None:
            self.settimeout(self.meter.left_s())  # type: ignore[attr-defined]
        return super().send(*args)  # type: ignore[misc,no-any-return]

    def sendall(self, *args: Any) -> None:
        if self.meter is not None:
            self.settimeout(self.meter.left_s())  # type: ignore[attr-defined]
        super().sendall(*args)  # type: ignore[misc]


class _Socket(_Metered, socket.socket):
    pass


class _TlsSocket(_Metered, ssl.SSLSocket):
    pass


class _Pinned(HTTPConnection):
    """A connection whose `host` is an address; `meter` is set before it connects."""

    meter: _Meter

    def _new_conn(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = _Socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)  # type: ignore[arg-type]  # `_connect` sets a number
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.connect((self.host, self.port))
            # For the handshake of TLS that follows: less time may be left by now.
            sock.settimeout(min(self.timeout, self.meter.left_s()))  # type: ignore[type-var]
        except BaseException:
            sock.close()
            raise
        return sock


class _Http(_Pinned):
    pass


class _Https(_Pinned, HTTPSConnection):
    pass


@functools.lru_cache(maxsize=4)
def _tls(ca_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or usual_authorities())
    context.sslsocket_class = _TlsSocket
    return context
