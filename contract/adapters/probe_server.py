"""A small HTTP server for Prometheus and health checks, on a port of its own.

    /metrics   what the process counts
    /healthz   200 while its main loop runs, else 503
    /readyz    200 when it can serve, else 503; the answer names what is missing

It answers without a key, so its port must not be public. Standard library only.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

log = logging.getLogger(__name__)

#: Prometheus's text format, in the form that every version reads.
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
#: Largest number of requests at a time; more are not answered.
MAX_REQUESTS = 8
#: Seconds until a client that sends or reads nothing is dropped.
CLIENT_TIMEOUT_S = 5.0


class PortTaken(Exception):
    """The server cannot listen; the message says on which address, and what to do."""


class ProbeServer:
    """Serves the three addresses from a thread until `close`.

    address   host and port; port 0 takes a free one
    metrics   returns the text of /metrics
    is_alive  whether the main loop runs
    missing   returns the names of what the process needs and does not have
    Raises PortTaken.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        metrics: Callable[[], bytes],
        is_alive: Callable[[], bool],
        missing: Callable[[], Sequence[str]],
    ) -> None:
        def answer(path: str) -> tuple[int, str, bytes] | None:
            if path == "/metrics":
                return 200, TEXT_FORMAT, metrics()
            if path == "/healthz":
                return (200, "text/plain", b"ok") if is_alive() else (503, "text/plain", b"stuck")
            if path == "/readyz":
                lacks = list(missing())
                return (503 if lacks else 200), "application/json", ready_body(lacks)
            return None

        class Handler(_Handler):
            answer_to = staticmethod(answer)

        try:
            self._server = _Server(address, Handler)
        except OSError as error:
            raise PortTaken(
                f"Cannot serve metrics at {address[0]}:{address[1]}: {error.strerror}. Set "
                "LORIKEET_METRICS_PORT to a free port, or LORIKEET_METRICS_ADDRESS to an address "
                "of this machine"
            ) from error
        threading.Thread(
            target=self._server.serve_forever, name="probe-server", daemon=True
        ).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def ready_body(missing: Sequence[str]) -> bytes:
    """Return the answer of /readyz."""
    return json.dumps({"ready": not missing, "missing": list(missing)}).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MAX_REQUESTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT_S
    server_version = "lorikeet"
    sys_version = ""
    answer_to: Callable[[str], tuple[int, str, bytes] | None]

    def do_GET(self) -> None:
        try:
            answer = self.answer_to(self.path.partition("?")[0])
        except Exception:
            log.exception("metrics cannot be collected")
            answer = 500, "text/plain", b"failed; the process's log says more"
        status, content_type, body = answer or (404, "text/plain", b"not found")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""
