"""A command line with a home of its own, and small servers that are not Lorikeet."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.runner import Cli

#: Method, path, headers and body of a request -> status, headers and body of its answer.
Answer = tuple[int, dict[str, str], bytes]
Handler = Callable[[str, str, dict[str, str], bytes], Answer]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Start a server that answers as a function says; -> its address."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(handler: Handler) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _request_handler(handler))
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _request_handler(handler: Handler) -> type[http.server.BaseHTTPRequestHandler]:
    class RequestHandler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, sent, data = handler(self.command, self.path, headers, body)
            self.send_response(status)
            for name, value in {**sent, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return RequestHandler
