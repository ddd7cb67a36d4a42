"""A small HTTP or HTTPS server that does what a test says, and notes what it was sent."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

#: Answers one request; the handler is Python's own.
Behaviour = Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def answer(status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> Behaviour:
    def behave(handler: Any) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return behave


class Receiver:
    """Listens on `address`; `behave` answers. With a certificate it speaks TLS."""

    def __init__(self, *, address: str = "127.0.0.1", port: int = 0, tls: Tls | None = None):
        self.received: list[Received] = []
        self.behave: Behaviour = answer(200)
        self.server_names: list[str | None] = []
        self._server = ThreadingHTTPServer((address, port), self._handler())
        self._server.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.certificate, tls.key)
            context.sni_callback = lambda _, name, __: self.server_names.append(name)
            # The handshake is in the request's thread, at its first read.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.command, self.path, headers, body))
                with contextlib.suppress(OSError):
                    receiver.behave(self)

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # a client that does not trust us goes away
                    super().handle()

        return Handler


@contextlib.contextmanager
def receiving(**options: Any) -> Iterator[Receiver]:
    receiver = Receiver(**options)
    try:
        yield receiver
    finally:
        receiver.close()


@dataclasses.dataclass(frozen=True)
class Tls:
    certificate: Path
    key: Path


def make_tls(folder: Path, *names: str) -> Tls:
    """Make a self-signed certificate for names and addresses; the file is its authority, too."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "receiver")])
    now = dt.datetime.now(dt.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    made = Tls(folder / "cert.pem", folder / "key.pem")
    made.certificate.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
