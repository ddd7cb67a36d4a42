"""What the web server does around every answer: HEAD, gzip, CORS, strangers' time."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fakes import FAKE_NAME
from tests.live import LiveStack

#: What docs/security.md promises to those who send no key.
PROMISED_S = 15.0
SHOP = "https://shop.example"
_ALLOW = f"""
import django
django.setup()
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.tenants.services import tenant_update
tenant = Tenant.objects.get(slug="acme")
with tenant_scope(tenant.id):
    tenant_update(tenant=tenant, allowed_origins=["{SHOP}"])
"""


@dataclasses.dataclass(frozen=True)
class Server:
    live: LiveStack
    url: str

    def ask(self, method: str, path: str, tenant: str = "acme", **options: Any) -> httpx.Response:
        headers = {"Accept-Encoding": "identity", **options.pop("headers", {})}
        if tenant:
            headers["Authorization"] = f"Bearer {self.live.tenants[tenant].key}"
        return httpx.request(method, self.url + path, headers=headers, timeout=30, **options)

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        return socket.create_connection((parts.hostname, parts.port), timeout=40)


@pytest.fixture(scope="module")
def server(live: LiveStack) -> Iterator[Server]:
    pool = live.with_pool("asgi")
    pool.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    pool.run("-c", _ALLOW)
    web, url = pool.start_web(DATABASE_POOL_SIZE="4", LORIKEET_BASE_URL="https://lorikeet.example")
    worker = pool.start_worker("asgi-worker", step_s=0.001)
    yield Server(pool, url)
    web.stop()
    worker.stop()


def chat(words: int = 3, **more: Any) -> dict[str, Any]:
    said = "fox " * words
    return {"model": FAKE_NAME, "messages": [{"role": "user", "content": said}], **more}


CHAT = "/v1/chat/completions"


class TestStrangersTime:
    def left_after(self, server: Server, path: str, header: str, chunked: bool) -> float:
        """Seconds until the server ends a request whose body brings 20 KB a second, for ever."""
        framing = "Transfer-Encoding: chunked" if chunked else "Content-Length: 5000000"
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}{framing}\r\n\r\n"
        piece = b"2000\r\n" + b" " * 8192 + b"\r\n" if chunked else b" " * 8192
        started = time.monotonic()
        with server.connect() as connection, contextlib.suppress(ConnectionError):
            connection.settimeout(0.4)
            connection.sendall(head.encode())
            while time.monotonic() - started < PROMISED_S + 5:
                connection.sendall(piece)
                with contextlib.suppress(TimeoutError):
                    if connection.recv(65536):
                        break
        return time.monotonic() - started

    def test_it_is_bounded_and_that_of_the_known_is_not(self, server: Server) -> None:
        known = f"Authorization: Bearer {server.live.tenants['acme'].key}\r\n"
        revoked = f"Authorization: Bearer {server.live.tenants['acme'].revoked_key}\r\n"
        paths = (CHAT, "/v1/files", "/api/v1/adapters", "/console/sign-in", "/nowhere")
        strangers = [(path, header, c) for path in paths for header, c in (("", False), ("", True))]
        strangers.append((CHAT, revoked, False))
        with ThreadPoolExecutor(20) as pool:
            kept = pool.submit(self.left_after, server, CHAT, known, False)
            ended = [pool.submit(self.left_after, server, *each) for each in strangers]
            assert max(each.result() for each in ended) < PROMISED_S + 1
            assert kept.result() > PROMISED_S + 3

    def test_a_trailer_opens_nothing(self, server: Server) -> None:
        key = server.live.tenants["acme"].key
        body = json.dumps(chat()).encode()
        sent = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        for pause_s in (0.0, 0.3):
            with server.connect() as connection:
                connection.sendall(sent.encode() + b"%x\r\n%s\r\n" % (len(body), body))
                time.sleep(pause_s)
                connection.sendall(f"0\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
                assert connection.recv(65536).startswith(b"HTTP/1.1 401")


class TestHead:
    @pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{FAKE_NAME}", "/api/v1/tenant"])
    def test_it_is_get_without_the_body(self, server: Server, path: str) -> None:
        whole, head = server.ask("GET", path), server.ask("HEAD", path)
        assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert server.ask("HEAD", path, tenant="").status_code == 401

    def test_there_is_none_where_there_is_no_get(self, server: Server) -> None:
        assert server.ask("HEAD", CHAT).status_code == 405

    def test_it_asks_for_what_get_asks(self, server: Server) -> None:
        """A key that may not read the audit trail."""
        for method in ("GET", "HEAD"):
            assert server.ask(method, "/api/v1/audit-events").status_code == 403


class TestGzip:
    TAKES = {"Accept-Encoding": "br;q=1, gzip;q=0.5"}

    def test_long_json_is_compressed(self, server: Server) -> None:
        body = chat(100, logprobs=True)
        plain = server.ask("POST", CHAT, json=body)
        packed = server.ask("POST", CHAT, json=body, headers=self.TAKES)
        assert packed.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert "Accept-Encoding" in packed.headers["vary"]
        assert int(packed.headers["content-length"]) < len(plain.content) / 3
        assert packed.json()["choices"] == plain.json()["choices"]

    def test_short_ones_are_not(self, server: Server) -> None:
        answer = server.ask("POST", CHAT, json=chat(), headers=self.TAKES)
        assert "content-encoding" not in answer.headers

    def test_streams_and_pages_are_not(self, server: Server) -> None:
        body = chat(100, stream=True)
        streamed = server.ask("POST", CHAT, json=body, headers=self.TAKES)
        assert "content-encoding" not in streamed.headers
        assert streamed.text.endswith("data: [DONE]\n\n")
        page = server.ask("GET", "/console/sign-in", tenant="", headers=self.TAKES)
        assert page.status_code == 200
        assert "content-encoding" not in page.headers

    @pytest.mark.parametrize(
        "headers", [{"Accept-Encoding": "gzip;q=0"}, {**TAKES, "Cookie": "sessionid=x"}], ids=str
    )
    def test_who_does_not_take_it_or_has_a_session_gets_none(
        self, server: Server, headers: dict[str, str]
    ) -> None:
        answer = server.ask("GET", "/api/openapi.json", tenant="", headers=headers)
        assert len(answer.content) > 65536  # more than one piece
        assert "content-encoding" not in answer.headers
        packed = server.ask("GET", "/api/openapi.json", tenant="", headers=self.TAKES)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.json() == answer.json()

    @pytest.mark.parametrize("path", [CHAT, "/api/v1/adapters", "/console/sign-in", "/v1/files"])
    def test_a_compressed_request_is_refused(self, server: Server, path: str) -> None:
        content = gzip.compress(json.dumps(chat()).encode())
        headers = {"Content-Encoding": "gzip"}
        answer = server.ask("POST", path, content=content, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"
        assert "compressed" in answer.json()["error"]["message"]


class TestCors:
    def preflight(self, server: Server, path: str = CHAT, origin: str = SHOP) -> httpx.Response:
        headers = {
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        return server.ask("OPTIONS", path, tenant="", headers=headers)

    def page(self, origin: str) -> dict[str, str]:
        return {"Origin": origin, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}

    def test_every_preflight_is_answered_alike(self, server: Server) -> None:
        """So none tells whose page an origin is."""
        allowed, other = self.preflight(server), self.preflight(server, origin="https://a.example")
        kept = {"access-control-allow-headers": "authorization,content-type,x-stainless-os"}
        for answer in (allowed, other, self.preflight(server, "/v1/files")):
            assert (answer.status_code, answer.content) == (204, b"")
            assert kept.items() <= dict(answer.headers).items()
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
            assert "POST" in answer.headers["access-control-allow-methods"]

    def test_the_console_and_the_management_api_have_none(self, server: Server) -> None:
        for path in ("/console/sign-in", "/api/v1/keys", "/ops/v1/workers", "/admin/"):
            assert "access-control-allow-origin" not in self.preflight(server, path).headers
            answer = server.ask("GET", path, headers=self.page(SHOP))
            assert "access-control-allow-origin" not in answer.headers

    @pytest.mark.parametrize(
        ("body", "status"),
        [(chat(), 200), (chat(stream=True), 200), (chat(model="none"), 404), (chat(n=99), 400)],
        ids=["whole", "stream", "unknown model", "bad body"],
    )
    def test_a_page_that_the_tenant_allows_reads_every_answer(
        self, server: Server, body: dict[str, Any], status: int
    ) -> None:
        answer = server.ask("POST", CHAT, json=body, headers=self.page(SHOP))
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == SHOP
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "Origin" in answer.headers["vary"]

    def test_another_page_is_refused_before_anything_is_done(self, server: Server) -> None:
        for tenant, origin in (("acme", "https://other.example"), ("globex", SHOP)):
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/v1/files")):
                answer = server.ask(
                    method,
                    path,
                    tenant,
                    headers=self.page(origin),
                    **({"json": chat()} if path == CHAT else {}),
                )
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "origin_not_allowed"
                assert "access-control-allow-origin" not in answer.headers

    def test_a_program_may_name_any_origin(self, server: Server) -> None:
        answer = server.ask("GET", "/v1/models", headers={"Origin": "app://desktop"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers

    def test_what_is_wrong_with_a_key_may_be_read(self, server: Server) -> None:
        refused = server.ask("GET", "/v1/models", tenant="", headers=self.page("https://a.example"))
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "*"


def test_browsers_are_told_to_stay_with_https(server: Server) -> None:
    """Where the platform's own address has it."""
    for path in ("/console/sign-in", "/v1/models", "/nowhere"):
        told = server.ask("GET", path).headers["strict-transport-security"]
        assert told == "max-age=31536000"
