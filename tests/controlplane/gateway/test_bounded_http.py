"""What a client may send to the web server, how slowly, and how many at a time.

The protocol runs in a server of its own here, with shorter times, behind real sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from controlplane.gateway import bounded_http
from controlplane.gateway.bounded_http import MAX_HEADERS, MAX_TARGET_BYTES, network_of

HOST = "127.0.0.1"
#: More than any head may have.
LONG = b"x" * 60_000


async def tell(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the headers and the body's length; /slow takes its time, /deaf reads nothing."""
    if scope["type"] != "http":
        return
    num_bytes, more = 0, scope["path"] != "/deaf"
    if scope["path"] == "/busy":
        await asyncio.sleep(1.5)
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    headers = [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]]
    body = json.dumps({"path": scope["path"], "headers": headers, "bytes": num_bytes}).encode()
    length = (b"content-length", b"%d" % len(body))
    if scope["path"] == "/large":
        body, length = b"y" * 50_000_000, (b"content-length", b"50000000")
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    if scope["path"] == "/slow":
        for byte in body:
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await asyncio.sleep(1.5 / len(body))
        body = b""
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[int]:
    """The port of a server in a thread."""
    config = uvicorn.Config(
        tell,
        host=HOST,
        port=0,
        http=bounded_http.BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        **{"forwarded_allow_ips": "", "timeout_keep_alive": 1, **options},
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        # `access_log=False` is for the process, and other tests read that log.
        logging.getLogger("uvicorn.access").propagate = True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name in ("HEAD_S", "BODY_WINDOW_S", "LEFTOVER_S", "WRITE_S"):
        monkeypatch.setattr(bounded_http, name, 0.5)
    monkeypatch.setattr(bounded_http, "_LOOK_S", 0.1)
    with serving() as found:
        yield found


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=5)


def answers_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def ask(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, Any]:
    """The status and the body of the last answer to what is sent; 0 for none."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):  # it is refused: what it says comes yet
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        received = answers_of(connection)
    head, _, body = received.rpartition(b"\r\n\r\n")
    if not head:
        return 0, None
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), json.loads(body)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"


class TestHead:
    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            (HEAD + b"A: " + LONG + b"\r\n\r\n", 431),
            (HEAD + b"A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431),
            (b"POST /" + b"x" * MAX_TARGET_BYTES + b" HTTP/1.1\r\n\r\n", 414),
            (HEAD + LONG + b": b\r\n\r\n", 431),
            (b"\r\n" * 40_000, 431),
            (b"no HTTP at all\r\n\r\n", 400),
        ],
        ids=["value", "number", "target", "name", "nothing", "no http"],
    )
    def test_too_much_is_refused(self, port: int, sent: bytes, status: int) -> None:
        # At once, and in pieces that the parser would join.
        for pieces in ([sent], [sent[at : at + 7000] for at in range(0, len(sent), 7000)]):
            got, body = ask(port, *pieces)
            assert got == status
            assert set(body["error"]) == {"message", "type", "param", "code"}

    def test_96_mib_of_one_header_keep_nobody_waiting(self, port: int) -> None:
        flood = threading.Thread(target=ask, args=(port, HEAD + b"A: ", *[b"x" * 2**20] * 96))
        flood.start()
        longest = 0.0
        while flood.is_alive():
            started = time.monotonic()
            assert ask(port, HEAD + CLOSE + b"\r\n")[0] == 200
            longest = max(longest, time.monotonic() - started)
        assert longest < 0.5

    def test_what_is_usual_passes(self, port: int) -> None:
        """A cookie of some kilobytes, a long query, headers that come in pieces."""
        many = b"".join(b"X-%d: %s\r\n" % (at, b"v" * 200) for at in range(80))
        sent = b"GET /?" + b"q" * 4000 + b" HTTP/1.1\r\n" + CLOSE + many + b"\r\n"
        status, body = ask(port, *[sent[at : at + 1000] for at in range(0, len(sent), 1000)])
        assert (status, len(body["headers"])) == (200, 81)

    def test_slow_headers_end(self, port: int) -> None:
        started = time.monotonic()
        status, body = ask(port, *[bytes([byte]) for byte in HEAD * 10], pause_s=0.05)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert time.monotonic() - started < 20
        for sent in (b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nCookie: "):
            with connect(port) as connection:
                connection.sendall(sent)
                started = time.monotonic()
                answers_of(connection)
                assert time.monotonic() - started < 3

    def test_line_ends_do_not_keep_a_connection(self, port: int) -> None:
        with connect(port) as connection:
            connection.sendall(HEAD + b"\r\n")
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - started < 10:
                    connection.sendall(b"\r\n")
                    time.sleep(0.1)
            assert time.monotonic() - started < 5


class TestBody:
    def chunked(self, *chunks: bytes, trailers: bytes = b"") -> bytes:
        framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        head = HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
        return head + framed + b"0\r\n" + trailers + b"\r\n"

    def test_trailers_are_no_headers(self, port: int) -> None:
        trailers = (
            b"Authorization: Bearer x\r\nX-Forwarded-For: 1.2.3.4\r\nExpect: 100-continue\r\n"
        )
        sent = self.chunked(b"body", trailers=trailers)
        # In one packet, and when the application has the headers already.
        for pieces in ([sent], [sent[:-60], sent[-60:]], [bytes([b]) for b in sent]):
            status, body = ask(port, *pieces, pause_s=0.001)
            assert (status, body["bytes"]) == (200, 4)
            assert {name for name, _ in body["headers"]} == {
                "host",
                "connection",
                "transfer-encoding",
            }

    @pytest.mark.parametrize(
        "end",
        [b"A: b\r\n" * 200, b"A: " + LONG + b"x" * 300_000, b"A: " + b"x" * 40_000 + b"\r\n"],
        ids=["many", "long", "longer than a head"],
    )
    def test_trailers_are_bounded(self, port: int, end: bytes) -> None:
        sent = self.chunked(b"body", trailers=end)
        assert ask(port, sent)[0] in (400, 431)
        assert ask(port, *[sent[at : at + 5000] for at in range(0, len(sent), 5000)])[0] in (
            400,
            431,
        )

    def test_frames_without_a_body_are_bounded(self, port: int) -> None:
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        assert ask(port, head, b"4;" + LONG * 6, LONG)[0] == 400

    def test_a_body_in_tiny_chunks_keeps_nobody_waiting(self, port: int) -> None:
        """Each chunk is a call of the parser's: 16 connections of them took 15 s of everybody."""
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        flood = b"1\r\na\r\n" * 50_000
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(connect(port)) for _ in range(16)]
            for stranger in strangers:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(head + flood[:60_000])
            for stranger in strangers:
                assert b" 400 " in answers_of(stranger).partition(b"\r\n")[0]
        status, answer = ask(port, head, flood)
        assert (status, answer["error"]["code"]) == (400, "chunks_too_small")

    def test_small_chunks_may_be_some_and_large_ones_many(self, port: int) -> None:
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        small = b"1\r\na\r\n" * (bounded_http.FREE_CHUNKS - 1)
        large = (b"200\r\n" + b"x" * 512 + b"\r\n") * 20_000
        for chunks, wanted in ((small, len(small) // 6), (large, 512 * 20_000)):
            status, answer = ask(port, head + chunks + b"0\r\n\r\n")
            assert (status, answer["bytes"]) == (200, wanted)

    def test_a_slow_body_ends(self, port: int) -> None:
        for head in (b"Content-Length: 9999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
            started = time.monotonic()
            drops = [b"1\r\nx\r\n"] * 100
            status, body = ask(port, HEAD + head, *drops, pause_s=0.05)
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert time.monotonic() - started < 20

    def test_a_slow_body_that_lives_arrives(
        self, port: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bounded_http, "MIN_WINDOW_BYTES", 100)
        pieces = [b"x" * 100] * 10
        head = HEAD + CLOSE + b"Content-Length: 1000\r\n\r\n"
        status, body = ask(port, head, *pieces, pause_s=0.2)  # four times a window
        assert (status, body["bytes"]) == (200, 1000)

    def test_who_is_not_read_is_not_slow(self, port: int) -> None:
        """The application is busy for longer than a body may stand still."""
        sent = b"POST /busy HTTP/1.1\r\n" + CLOSE + b"Content-Length: 3000000\r\n\r\n"
        status, body = ask(port, sent, b"x" * 3_000_000)
        assert (status, body["bytes"]) == (200, 3_000_000)

    def test_the_rest_of_a_body_that_was_answered_ends(self, port: int) -> None:
        with connect(port) as connection:
            connection.sendall(b"POST /deaf HTTP/1.1\r\nContent-Length: 9999\r\n\r\n")
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - started < 10:
                    connection.sendall(b"x")
                    time.sleep(0.1)
            assert time.monotonic() - started < 5


class TestAnswers:
    def test_a_long_answer_goes_on_beside_the_next_request(self, port: int) -> None:
        """A stream longer than every time above, and the head of a second request with it."""
        with connect(port) as connection:
            connection.sendall(b"GET /slow HTTP/1.1\r\n\r\nGET /ne")
            received = answers_of(connection)
        assert received.endswith(b'"bytes": 0}')

    def test_who_takes_nothing_is_left(self, port: int) -> None:
        with connect(port) as connection:
            connection.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            time.sleep(2)
            assert len(answers_of(connection)) < 50_000_000

    def test_connections_are_kept(self, port: int) -> None:
        with connect(port) as connection:
            for _ in range(5):
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
                time.sleep(0.7)  # longer than a head may take

    def test_pipelined_requests_are_answered_in_order_and_are_few(self, port: int) -> None:
        requests = [b"GET /%d HTTP/1.1\r\n\r\n" % at for at in range(20)]
        with connect(port) as connection:
            connection.sendall(b"".join(requests) + b"GET /20 HTTP/1.1\r\n" + CLOSE + b"\r\n")
            received = answers_of(connection)
        places = [received.index(b'"path": "/%d"' % at) for at in range(21)]
        assert places == sorted(places)
        with connect(port) as connection:
            connection.sendall(b"GET /busy HTTP/1.1\r\n\r\n" * 10_000)
            assert answers_of(connection).count(b"200 OK") <= 1

    def test_an_upgrade_is_passed_over(self, port: int) -> None:
        """Java's client asks for HTTP/2 with its first request, and sends its body all the same."""
        asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        sent = HEAD + asks + b"Content-Length: 4\r\n\r\nbody" + HEAD + CLOSE + b"\r\n"
        for pieces in ([sent], [sent[:-60], sent[-60:]], [bytes([byte]) for byte in sent]):
            with connect(port) as connection:
                for piece in pieces:
                    connection.sendall(piece)
                received = answers_of(connection)
            assert received.count(b"200 OK") == 2
            assert received.count(b'"bytes": 4') == 1
        assert ask(port, b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")[0] == 405


class TestConnections:
    @pytest.fixture
    def few(self, settings: Any) -> None:
        settings.MAX_CONNECTIONS_PER_ADDRESS = 3

    def test_one_address_has_so_many(self, few: None) -> None:
        with serving() as port, contextlib.ExitStack() as opened:
            for _ in range(3):
                opened.enter_context(connect(port))
            until(lambda: ask(port, b"GET / HTTP/1.1\r\n\r\n")[0] == 429)
            status, body = ask(port)
            assert (status, body["error"]["code"]) == (429, "too_many_connections")
            opened.close()
            until(lambda: ask(port, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")[0] == 200)

    def test_a_trusted_proxy_has_as_many_as_it_wants(self, few: None) -> None:
        with (
            serving(forwarded_allow_ips="10.0.0.0/8,127.0.0.1") as port,
            contextlib.ExitStack() as opened,
        ):
            for _ in range(10):
                opened.enter_context(connect(port))
            time.sleep(0.2)
            assert ask(port, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")[0] == 200

    def test_a_network_of_ipv6_is_one_address(self) -> None:
        assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001::1")
        assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
        assert network_of("fe80::1%eth0") == "fe80::/64"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
