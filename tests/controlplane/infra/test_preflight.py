"""What cannot be used at the start is named, with what to do about it, within seconds."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings as configured

from controlplane.infra import storage
from controlplane.infra.health import preflight


def test_servers_that_are_well_pass(settings: Any) -> None:
    preflight.check_database("the application", configured.DATABASES["default"])
    preflight.check_redis("REDIS_URL", settings.REDIS_URL)
    settings.S3_BUCKET = f"preflight-{time.time_ns()}"
    preflight.check_store()  # makes the bucket
    preflight.check_store()
    assert list(storage.keys("")) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PASSWORD": "wrong"}, "password authentication failed.*was made with another password"),
        ({"PORT": "1"}, "use PostgreSQL at 127.0.0.1:1: .*refused"),
        (
            {"HOST": "nowhere.invalid"},
            "use PostgreSQL at nowhere.invalid.*Name or service not known",
        ),
        ({"NAME": "nothing"}, 'database "nothing" does not exist'),
    ],
)
def test_a_database_that_cannot_be_used(change: dict[str, str], said: str) -> None:
    began = time.monotonic()
    with pytest.raises(preflight.NotReady, match=f"^the application cannot.*{said}"):
        preflight.check_database("the application", configured.DATABASES["default"] | change)
    assert time.monotonic() - began < 10


def test_a_redis_that_cannot_be_used() -> None:
    port = urlsplit(configured.REDIS_URL).port
    with pytest.raises(preflight.NotReady, match="REDIS_URL: Redis refuses the password"):
        preflight.check_redis("REDIS_URL", f"redis://:wrong@127.0.0.1:{port}/0")
    with pytest.raises(preflight.NotReady, match="REDIS_URL: Redis does not answer"):
        preflight.check_redis("REDIS_URL", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"S3_ENDPOINT_URL": "http://127.0.0.1:1"}, "cannot be reached"),
        ({"S3_ACCESS_KEY_ID": "nobody"}, "it does not know S3_ACCESS_KEY_ID"),
        ({"S3_SECRET_ACCESS_KEY": "wrong"}, "S3_SECRET_ACCESS_KEY is not the one of"),
    ],
)
def test_a_store_that_cannot_be_used(
    settings: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    for name, value in change.items():
        setattr(settings, name, value)
    storage._client.cache_clear()
    try:
        began = time.monotonic()
        with pytest.raises(preflight.NotReady, match=said):
            preflight.check_store()
        assert time.monotonic() - began < 10
        if "S3_ENDPOINT_URL" in change:
            with pytest.raises(preflight.NotReady, match=said):
                preflight.allow_uploads()
        else:  # a key that may not change the rules hinders no start
            assert said in preflight.allow_uploads()
            assert f"Let pages of {settings.BASE_URL}" in preflight.allow_uploads()
    finally:
        storage._client.cache_clear()


_WRONG_REGION = b"""<?xml version="1.0"?><Error><Code>AuthorizationHeaderMalformed</Code>
<Message>the region 'us-east-1' is wrong; expecting 'eu-central-1'</Message></Error>"""


class _OtherRegion(http.server.BaseHTTPRequestHandler):
    """A store that answers as S3 does for a bucket of another region."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(400)
        self.send_header("Content-Length", str(len(_WRONG_REGION)))
        self.end_headers()
        self.wfile.write(_WRONG_REGION)

    def do_HEAD(self) -> None:
        self.send_response(400)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_store_of_another_region_is_named(settings: Any) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OtherRegion) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings.S3_ENDPOINT_URL = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(preflight.NotReady, match="it is of another region than S3_REGION"):
            preflight.check_store()
        server.shutdown()


def test_a_store_that_does_not_answer_is_named_within_10_s(settings: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings.S3_ENDPOINT_URL = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(preflight.NotReady, match="cannot be reached"):
            preflight.check_store(patience_s=2)
        assert time.monotonic() - began < 10
