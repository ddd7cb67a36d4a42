"""Mail: where a URL says that it goes, and that it gets there."""

from __future__ import annotations

import os
import socketserver
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import get_connection, send_mail

from controlplane.infra.mail import email_settings
from demo.platform import environment, mail_folder

SMTP = "django.core.mail.backends.smtp.EmailBackend"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("smtp://mail", {"EMAIL_HOST": "mail", "EMAIL_PORT": 25}),
        ("smtp+tls://mail", {"EMAIL_PORT": 587, "EMAIL_USE_TLS": True}),
        ("smtps://mail:4650", {"EMAIL_PORT": 4650, "EMAIL_USE_SSL": True}),
        (
            "smtps://me%40acme.example:p%2Fw@mail",
            {"EMAIL_HOST_USER": "me@acme.example", "EMAIL_HOST_PASSWORD": "p/w"},
        ),
        ("file:///var/mail", {"EMAIL_FILE_PATH": "/var/mail"}),
        ("console:", {}),
    ],
)
def test_a_url_says_where(url: str, expected: dict[str, Any]) -> None:
    found = email_settings(url)
    assert expected.items() <= found.items()
    assert (found["EMAIL_BACKEND"] == SMTP) == url.startswith("smtp")


@pytest.mark.parametrize("url", ["", "mail.example", "http://mail", "smtp://", "file:mail"])
def test_what_is_no_address_for_mail_stops_the_start(url: str) -> None:
    with pytest.raises(ImproperlyConfigured):
        email_settings(url)


def test_a_mail_in_a_file_is_for_its_owners_eyes(tmp_path: Path, settings: Any) -> None:
    found = email_settings(f"file://{tmp_path}/mail")
    settings.EMAIL_FILE_PATH = found["EMAIL_FILE_PATH"]
    before = os.umask(0o022)
    try:
        connection = get_connection(found["EMAIL_BACKEND"])
        send_mail("Lost", "https://x/reset", None, ["you@acme.example"], connection=connection)
    finally:
        os.umask(before)
    [file] = (tmp_path / "mail").iterdir()
    assert "https://x/reset" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_demos_mail_is_in_files_and_not_in_its_log(tmp_path: Path) -> None:
    env = environment({}, folder=tmp_path, base_url="http://x", base_model_dir=tmp_path / "base")
    found = email_settings(env["EMAIL_URL"])
    assert found["EMAIL_FILE_PATH"] == str(mail_folder(tmp_path))
    assert "mail_files" in found["EMAIL_BACKEND"]


class Server(socketserver.ThreadingTCPServer):
    """As much of SMTP as a client needs to hand over a mail."""

    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.mails: list[str] = []


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Server)
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().decode().strip():
            if line.lower() == "data":
                self.wfile.write(b"354 go on\r\n")
                mail = []
                while (text := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                    mail.append(text)
                self.server.mails.append("\n".join(mail))
            is_over = line.lower() == "quit"
            self.wfile.write(b"221 bye\r\n" if is_over else b"250 ok\r\n")
            if is_over:
                return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


def test_a_mail_gets_there(server: Server, settings: Any) -> None:
    found = email_settings(f"smtp://127.0.0.1:{server.server_address[1]}")
    for name, value in found.items():
        setattr(settings, name, value)
    connection = get_connection(SMTP, host=found["EMAIL_HOST"], port=found["EMAIL_PORT"])
    send_mail("Subject", "The text.", None, ["you@acme.example"], connection=connection)
    [mail] = server.mails
    assert "To: you@acme.example" in mail
    assert "The text." in mail
