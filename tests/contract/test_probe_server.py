"""The port of metrics: it answers three addresses, to few at a time, and names what is missing."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from contract.adapters import probe_server
from contract.adapters.probe_server import MAX_REQUESTS, PortTaken, ProbeServer

LACKS: list[str] = []
ALIVE = [True]


def fails() -> bytes:
    raise RuntimeError("no metrics")


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    LACKS.clear()
    ALIVE[0] = True
    made = ProbeServer(
        ("127.0.0.1", 0),
        metrics=lambda: b"lorikeet_x 1\n",
        is_alive=lambda: ALIVE[0],
        missing=lambda: LACKS,
    )
    yield made
    made.close()


def get(server: ProbeServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_three_addresses_and_no_others(server: ProbeServer) -> None:
    assert get(server, "/metrics?name[]=x") == (200, b"lorikeet_x 1\n")
    assert get(server, "/healthz") == (200, b"ok")
    assert get(server, "/readyz") == (200, b'{"ready": true, "missing": []}')
    for path in ("/", "/metrics/", "/../etc/passwd"):
        assert get(server, path)[0] == 404


def test_what_is_missing_is_named(server: ProbeServer) -> None:
    LACKS.append("redis")
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "missing": ["redis"]})
    ALIVE[0] = False
    assert get(server, "/healthz") == (503, b"stuck")


def test_metrics_that_fail_say_so_and_no_more() -> None:
    made = ProbeServer(("127.0.0.1", 0), metrics=fails, is_alive=lambda: True, missing=lambda: [])
    status, body = get(made, "/metrics")
    assert status == 500 and b"RuntimeError" not in body
    assert get(made, "/healthz")[0] == 200
    made.close()


def test_silent_clients_take_no_more_than_their_places(
    server: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_REQUESTS)]
    time.sleep(0.2)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(server, "/healthz")
    for client in silent:
        client.close()
    time.sleep(0.2)
    assert get(server, "/healthz")[0] == 200
    assert probe_server.CLIENT_TIMEOUT_S < 10


def test_a_port_that_is_taken_names_the_setting(server: ProbeServer) -> None:
    with pytest.raises(PortTaken, match=f"127.0.0.1:{server.port}.*LORIKEET_METRICS_PORT"):
        ProbeServer(
            ("127.0.0.1", server.port),
            metrics=bytes,
            is_alive=lambda: True,
            missing=lambda: [],
        )
