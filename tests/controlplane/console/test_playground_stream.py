"""The address that the playground's columns stream from.

A real web server, a worker around an engine that echoes, a real accountant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from controlplane.console.views.playground import (
    ENDPOINT,
    MAX_BODY_BYTES,
    MAX_STREAMS_OF_PERSON,
)
from tests.live import LiveStack, wait_for

RUN = "/console/playground/run"

#: Makes members of the tenants, and prints their sessions by their addresses.
SIGN_IN = """
import json
from django.test import Client
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.tenants.services import member_add
sessions = {}
for email, role in PEOPLE.items():
    tenant = Tenant.objects.get(slug=email.partition("@")[2].removesuffix(".example"))
    with tenant_scope(tenant.id):
        user = member_add(email=email, role=role, password="a long enough passphrase").user
    client = Client()
    client.force_login(user)
    sessions[email] = client.cookies["sessionid"].value
print(json.dumps(sessions))
"""
PEOPLE = {
    "dev@acme.example": "developer",
    "busy@acme.example": "developer",
    "calm@acme.example": "developer",
    "changing@acme.example": "owner",
    "owner@globex.example": "owner",
}
SET_ROLE = """
update tenants_membership set role = %s
where user_id = (select id from tenants_user where email = %s)
"""
#: A step of the engine takes 20 ms, so that a stream lasts while others begin.
STEP_S = 0.02
FOR_EVER = {"ignore_eos": True, "max_tokens": 100_000}


@dataclasses.dataclass(frozen=True)
class Person:
    """Somebody who is signed in: their browser, as far as the endpoint sees it."""

    http: httpx.Client
    token: str

    def send(self, content: Any, **headers: str) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = {"Content-Type": "application/json", "X-CSRFToken": self.token, **headers}
        return self.http.post(RUN, content=body, headers=given)

    def compare(self, texts: list[str], model: str = "acme-adapter") -> httpx.Response:
        headers = {"X-CSRFToken": self.token}
        body = {"model": model, "input": texts}
        return self.http.post("/console/playground/vectors", json=body, headers=headers)

    @contextlib.contextmanager
    def streaming(self, body: dict[str, Any]) -> Iterator[httpx.Response]:
        headers = {"X-CSRFToken": self.token}
        with self.http.stream("POST", RUN, json=body, headers=headers) as response:
            yield response


@dataclasses.dataclass(frozen=True)
class Console:
    live: LiveStack
    url: str

    sessions: dict[str, str]

    def person(self, email: str) -> Person:
        cookies = {"sessionid": self.sessions[email]}
        http = httpx.Client(base_url=self.url, cookies=cookies, timeout=30)
        page = http.get("/console/security").text  # which everybody may open
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
        assert found
        return Person(http, found[1])

    def set_role(self, email: str, role: str) -> None:
        with psycopg.connect(self.live.database_url) as connection:
            assert connection.execute(SET_ROLE, (role, email)).rowcount == 1


def asks(text: str = "Hello world", model: str = "acme-adapter", **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def chunks(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["type"], error["code"]


@pytest.fixture(scope="module")
def console(live: LiveStack) -> Iterator[Console]:
    pool = live.with_pool("playground")
    web, url = pool.start_web(DATABASE_POOL_SIZE="4")
    worker = pool.start_worker("playground-worker", step_s=STEP_S)
    accountant = pool.start_accountant()
    code = f"PEOPLE = {PEOPLE!r}\n{SIGN_IN}"
    sessions = json.loads(pool.run("manage.py", "shell", "--no-imports", "-c", code))
    yield Console(pool, url, sessions)
    assert web.stop() == -signal.SIGTERM
    for process in (worker, accountant):
        assert process.stop() == 0, process.log.read_text()


@pytest.fixture(scope="module")
def developer(console: Console) -> Person:
    return console.person("dev@acme.example")


class TestStream:
    def test_answers_as_the_gateway_and_is_billed_to_the_tenant(
        self, console: Console, developer: Person
    ) -> None:
        response = developer.send(asks("Grüße 🦜"))
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-lorikeet-served"] == "acme-adapter@1"
        found = chunks(response)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in found if c["choices"])
        assert text == "Grüße 🦜"
        row = console.live.usage_row(response.headers["x-request-id"])
        assert row["api_key_id"] is None
        assert str(row["tenant_id"]) == console.live.tenants["acme"].id
        assert row["completion_tokens"] == found[-1]["usage"]["completion_tokens"] > 0
        said = developer.http.get(f"/console/requests/{row['request_id']}").text
        assert f"<code>{ENDPOINT}</code>, streamed" in said
        assert "a person in the playground" in said
        assert "the playground" in developer.http.get("/console/usage?by=key").text

    def test_a_base_model_and_a_blend(self, developer: Person) -> None:
        response = developer.send(asks(model="fake-base"))
        assert response.headers["x-lorikeet-served"] == "fake-base ffffffffffff"
        blend = [{"name": "acme-adapter", "weight": 0.7}, {"name": "acme-second@1", "weight": 0.3}]
        body = {name: value for name, value in asks().items() if name != "model"}
        response = developer.send({**body, "adapters": blend})
        assert response.headers["x-lorikeet-served"] == "0.7 * acme-adapter@1 + 0.3 * acme-second@1"

    def test_who_goes_away_is_not_billed_for_the_rest(
        self, console: Console, developer: Person
    ) -> None:
        with developer.streaming(asks(**FOR_EVER)) as response:
            next(response.iter_bytes())
        row = console.live.usage_row(response.headers["x-request-id"])
        assert row["finish_reason"] == "cancelled"
        assert row["completion_tokens"] < 1000

    def test_a_failure_has_its_type(self, developer: Person) -> None:
        assert refusal(developer.send(asks(model="acme-misfit"))) == (
            409, "invalid_request_error", "adapter_incompatible",
        )  # fmt: skip
        assert refusal(developer.send(asks(model="acme-adapter@9")))[0] == 404


class TestVectors:
    def test_two_texts_are_compared(self, developer: Person) -> None:
        told = developer.compare(["a text", "another"]).json()
        assert told["vectors"] == [[1.0, *[0.0] * 7]] * 2  # as the echoing engine has it
        assert (told["dimensions"], told["similarity"], told["labels"]) == (32, 1.0, None)
        assert told["prompt_tokens"] > 2
        assert developer.compare(["a text"]).json()["similarity"] is None

    def test_what_it_refuses(self, console: Console, developer: Person) -> None:
        assert developer.compare(["a", "b", "c"]).status_code == 400
        assert developer.compare(["a"], model="globex-adapter").status_code == 404


class TestWho:
    def test_roles_as_they_are_now(self, console: Console) -> None:
        person = console.person("changing@acme.example")
        for role in ("owner", "admin", "developer"):
            console.set_role("changing@acme.example", role)
            assert person.send(asks()).status_code == 200, role
        for role in ("viewer", "billing"):
            console.set_role("changing@acme.example", role)
            assert refusal(person.send(asks())) == (403, "permission_error", "permission_denied")

    def test_nobody_without_a_session(self, console: Console, developer: Person) -> None:
        stranger = Person(httpx.Client(base_url=console.url), developer.token)
        stranger.http.cookies.set("csrftoken", developer.http.cookies["csrftoken"])
        key = {"Authorization": f"Bearer {console.live.tenants['acme'].key}"}
        for headers in ({}, key):
            answer = stranger.send(asks(), **headers)
            assert answer.status_code == 302
            assert answer.headers["location"].startswith("/console/sign-in")

    def test_a_session_is_no_key(self, developer: Person) -> None:
        answer = developer.http.post("/v1/chat/completions", json=asks())
        assert refusal(answer) == (401, "authentication_error", "invalid_api_key")

    def test_only_the_consoles_own_pages(self, console: Console, developer: Person) -> None:
        assert developer.send(asks(), **{"X-CSRFToken": "x" * 64}).status_code == 403
        assert developer.send(asks(), Origin="https://evil.example").status_code == 403
        assert developer.send(asks(), Origin=console.url).status_code == 200

    def test_another_tenants_adapters_are_not_there(self, console: Console) -> None:
        stranger = console.person("owner@globex.example")
        answers = [stranger.send(asks(model=name)) for name in ("acme-adapter", "no-such-adapter")]
        assert {refusal(answer) for answer in answers} == {
            (404, "invalid_request_error", "model_not_found")
        }
        assert stranger.send(asks(model="globex-adapter")).status_code == 200


class TestLimits:
    def test_those_of_the_tenant_hold(self, console: Console) -> None:
        person = console.person("owner@globex.example")

        def post(address: str, **fields: str) -> None:
            form = {"csrfmiddlewaretoken": person.token, **fields}
            assert person.http.post(f"/console/budgets/{address}", data=form).status_code == 302

        def status() -> int:
            return person.send(asks(model="globex-adapter")).status_code

        post("set", period="day", hard_limit="1")
        wait_for(lambda: status() == 429, what="the budget's effect")
        answer = person.send(asks(model="globex-adapter"))
        assert refusal(answer) == (429, "insufficient_quota", "insufficient_quota")
        found = re.search(
            r"/console/budgets/([-\w]+)/remove", person.http.get("/console/limits").text
        )
        assert found
        post(f"{found[1]}/remove")
        wait_for(lambda: status() == 200, what="its end")

    def test_so_many_streams_of_a_person_at_a_time(self, console: Console) -> None:
        person, other = (console.person(f"{name}@acme.example") for name in ("busy", "calm"))
        with contextlib.ExitStack() as running:
            for _ in range(MAX_STREAMS_OF_PERSON):
                response = running.enter_context(person.streaming(asks(**FOR_EVER)))
                assert response.status_code == 200
            answer = person.send(asks())
            assert refusal(answer) == (429, "requests", "rate_limit_exceeded")
            assert "playground" in answer.json()["error"]["message"]
            assert other.send(asks()).status_code == 200
        wait_for(lambda: person.send(asks()).status_code == 200, what="room for the next one")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"a":' * 5000, 400),
        (json.dumps(asks("x" * MAX_BODY_BYTES)).encode(), 413),
        ({**asks(), "stream": False}, 400),
        ({**asks(), "n": 17}, 400),
        ({**asks(), "temperature": float("nan")}, 400),
        ({**asks(), "no_such_field": 1}, 400),
        ({**asks(), "model": "a\0b"}, 404),
        ({**asks(), "model": ""}, 404),
        ({**asks(), "messages": []}, 400),
    ],
)
def test_hostile_bodies_are_refused(body: Any, status: int, developer: Person) -> None:
    answer = developer.send(body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_form_is_refused(developer: Person) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert developer.send(b"model=acme-adapter", **form).status_code == 415
