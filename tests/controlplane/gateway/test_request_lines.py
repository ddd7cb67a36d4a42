"""One line for each request, in each process, under ids that the answer's headers have."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live import LiveStack, Process, wait_for

Line = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5}


class Logged:
    """A gateway and a worker that log as JSON."""

    def __init__(self, live: LiveStack, web: tuple[Process, str], worker: Process) -> None:
        self.live, self.worker = live, worker
        self.web, self.url = web

    def ask(self, path: str, *, tenant: str = "acme", **options: Any) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {self.live.tenants[tenant].key}",
            **options.pop("headers", {}),
        }
        method = "POST" if "json" in options else "GET"
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30, **options)

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": self.live.tenants["acme"].adapter, **CHAT, **fields}
        return self.ask("/v1/chat/completions", json=body, headers=headers or {})

    def lines(self, process: Process, **fields: Any) -> list[Line]:
        """The lines of a process that have these fields. Each line of the file is JSON."""
        text = process.log.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in lines if fields.items() <= line.items()]

    def line(self, process: Process, event: str, **fields: Any) -> Line:
        [line] = wait_for(lambda: self.lines(process, event=event, **fields), what=event)
        return line


@pytest.fixture(scope="module")
def logged(live: LiveStack) -> Iterator[Logged]:
    apart = live.with_pool("logged")
    env = {"LORIKEET_LOG_FORMAT": "json", "LORIKEET_LOG_LEVEL": "DEBUG"}
    worker = apart.start_worker("logged-1", step_s=0.01, **env)  # whoever leaves has time to
    web = apart.start_web(**env)
    yield Logged(apart, web, worker)
    assert web[0].stop() == -signal.SIGTERM  # uvicorn raises it again
    assert worker.stop() == 0, worker.log.read_text()


def test_a_request_is_one_line_in_each_process(logged: Logged) -> None:
    answer = logged.chat()
    request_id = answer.headers["x-request-id"]
    tenant = logged.live.tenants["acme"]
    line = logged.line(logged.web, "request", request_id=request_id)
    assert (line["level"], line["logger"]) == ("info", "controlplane.requests")
    assert (line["method"], line["route"]) == ("POST", "/v1/chat/completions")
    assert (line["status"], line["outcome"], line["stream"]) == (200, "ok", False)
    assert (line["tenant_id"], line["tenant"]) == (tenant.id, "acme")
    assert line["model"] == tenant.adapter and line["caller"].startswith("key:")
    assert line["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert 0 <= line["queue_ms"] <= line["duration_ms"]

    ended = logged.line(logged.worker, "request ended", request_id=request_id)
    assert (ended["outcome"], ended["attempt"], len(ended["adapters"])) == ("length", 1, 1)
    assert ended["completion_tokens"] == line["completion_tokens"]
    assert "client_request_id" not in line | ended and "x-client-request-id" not in answer.headers
    # In the engine's process, by its own id for it.
    assert logged.line(logged.worker, "request begins", request_id=request_id)["engine_part"]
    assert len(logged.lines(logged.web, request_id=request_id)) == 1


def test_a_stream_is_one_line_however_long_it_is(logged: Logged) -> None:
    words = " ".join(map(str, range(60)))
    messages = [{"role": "user", "content": words}]
    answer = logged.chat(stream=True, max_tokens=50, messages=messages)
    assert answer.text.count("data:") > 4
    request_id = answer.headers["x-request-id"]
    line = logged.line(logged.web, "request", request_id=request_id)
    assert (line["outcome"], line["stream"], line["completion_tokens"]) == ("ok", True, 50)
    assert 0 < line["first_token_ms"] < line["duration_ms"]
    assert len(logged.lines(logged.web, request_id=request_id)) == 1


def test_a_client_that_leaves_a_stream_is_told_apart(logged: Logged) -> None:
    tenant = logged.live.tenants["acme"]
    with (
        httpx.Client(headers={"Authorization": f"Bearer {tenant.key}"}, timeout=30) as client,
        client.stream(
            "POST",
            f"{logged.url}/v1/chat/completions",
            json={**CHAT, "model": tenant.adapter, "stream": True, "max_tokens": 100_000},
        ) as answer,
    ):
        next(answer.iter_lines())
    line = logged.line(logged.web, "request", request_id=answer.headers["x-request-id"])
    assert (line["status"], line["outcome"]) == (200, "client_left")


def test_a_refusal_says_its_code(logged: Logged) -> None:
    answer = logged.chat(model="nobodys")
    line = logged.line(logged.web, "request", request_id=answer.headers["x-request-id"])
    assert (line["status"], line["outcome"], line["code"]) == (404, "refused", "model_not_found")
    answer = logged.chat(max_tokens=10**9)
    line = logged.line(logged.web, "request", request_id=answer.headers["x-request-id"])
    assert (line["status"], line["outcome"]) == (answer.status_code, "refused")


@pytest.mark.parametrize("header", ["X-Client-Request-Id", "X-Request-Id"])
def test_a_clients_id_goes_with_the_request_and_back(logged: Logged, header: str) -> None:
    own = f"trace-{header}/0af7651916cd43dd=1"
    answer = logged.chat({header: own})
    request_id = answer.headers["x-request-id"]
    assert answer.headers["x-client-request-id"] == own
    assert request_id.startswith("req_")
    for process, event in ((logged.web, "request"), (logged.worker, "request ended")):
        assert logged.line(process, event, client_request_id=own)["request_id"] == request_id


def test_a_clients_id_never_takes_the_place_of_ours(logged: Logged) -> None:
    """Two requests under one id are two requests: in the log, and billed each."""
    first, second = (logged.chat({"X-Request-Id": "same"}) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    both = logged.lines(logged.web, client_request_id="same", event="request")
    assert len({line["request_id"] for line in both}) == 2
    taken = first.headers["x-request-id"]
    again = logged.chat({"X-Request-Id": taken})
    assert (again.status_code, again.headers["x-client-request-id"]) == (200, taken)
    assert again.headers["x-request-id"] != taken


@pytest.mark.parametrize("sent", ["a b", "x" * 129, 'a"b', "é", "-a", ""])
def test_an_id_of_other_characters_or_too_long_is_ignored(logged: Logged, sent: str) -> None:
    answer = logged.chat({"X-Request-Id": sent.encode("latin-1")})  # type: ignore[dict-item]
    assert answer.status_code == 200
    assert "x-client-request-id" not in answer.headers
    line = logged.line(logged.web, "request", request_id=answer.headers["x-request-id"])
    assert "client_request_id" not in line


def test_concurrent_requests_keep_their_own_ids(logged: Logged) -> None:
    """A warning that is written while 20 requests run has the id of its own."""
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: logged.chat({"X-Request-Id": f"c-{n}"}), range(20)))
    for number, answer in enumerate(answers):
        line = logged.line(logged.web, "request", client_request_id=f"c-{number}")
        assert line["request_id"] == answer.headers["x-request-id"]


def test_management_and_pages_have_lines_without_paths(logged: Logged) -> None:
    answer = logged.ask("/api/v1/keys", headers={"X-Request-Id": "list-keys"})
    assert answer.headers["x-client-request-id"] == "list-keys"
    line = logged.line(logged.web, "request", client_request_id="list-keys")
    assert (line["request_id"], line["route"]) == (answer.headers["x-request-id"], "/api/v1/keys")
    assert (line["tenant"], line["status"], line["outcome"]) == ("acme", 200, "ok")

    token = "TOKEN-of-an-invite-7f3a"
    page = httpx.get(f"{logged.url}/console/invites/{token}?password=hunter22", timeout=30)
    line = logged.line(logged.web, "request", request_id=page.headers["x-request-id"])
    assert line["route"].startswith("/console/invites/<")
    httpx.get(f"{logged.url}/healthz", timeout=30)
    text = logged.web.log.read_text()
    assert token not in text and "hunter22" not in text and "/healthz" not in text
