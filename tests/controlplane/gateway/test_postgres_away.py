"""PostgreSQL is stopped, or hangs, under load: who is known goes on for a while, and no longer.

The servers, two gateways, the worker and the accountant are real processes of this module's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psycopg
import pytest

from controlplane.tenants import auth
from demo.stack import EmbeddedStack
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, live_stack, wait_for
from tests.own_servers import OwnServers, own_servers

AWAY_S = 5.0
#: A gateway counts from its last contact, which may be that much before the outage.
CONTACT_S = 1.5
#: Within which all must be well again.
RETURN_S = 2.0
SEED = """
import json
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Role, ServiceAccount, Tenant
from controlplane.tenants.permissions import Permission
with tenant_scope(services.tenant_create(slug="initech", name="Initech").id):
    account = ServiceAccount.objects.create(name="admin", role=Role.OWNER)
    rules = KeyRules(scopes=tuple(permission.value for permission in Permission))
    _, admin = services.api_key_create(name="admin", rules=rules, owner=account)
    doomed = [services.api_key_create(name=f"doomed {i}") for i in range(4)]
with tenant_scope(Tenant.objects.get(slug="acme").id):
    plain = [services.api_key_create(name=f"plain {i}") for i in range(4)]
print(json.dumps({"admin": admin, "doomed": [(key.public_id, text) for key, text in doomed],
                  "plain": [text for _, text in plain]}))
"""


@dataclasses.dataclass
class Answer:
    at: float
    took_s: float
    status: int
    request_id: str
    retry_after: str | None


class Load:
    """A client that asks again and again with one key, and notes what became of it."""

    def __init__(self, url: str, key: str, *, pause_s: float = 0.05, **body: Any) -> None:
        self.answers: list[Answer] = []
        self._url, self._pause_s = url, pause_s
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {"model": FAKE_NAME, "prompt": "x", "max_tokens": 2, **body}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=30) as client:
            while not self._stop.wait(self._pause_s):
                self.answers.append(ask(client, self._body))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(40)
        assert not self._thread.is_alive()

    def since(self, moment: float, until: float = float("inf")) -> list[Answer]:
        """Those that began then and ended before `until`."""
        return [
            answer
            for answer in list(self.answers)
            if answer.at >= moment and answer.at + answer.took_s < until
        ]


def ask(client: httpx.Client, body: dict[str, Any]) -> Answer:
    at = time.monotonic()
    response = client.post("/v1/completions", json=body)
    return Answer(
        at,
        time.monotonic() - at,
        response.status_code,
        response.headers["x-request-id"],
        response.headers.get("Retry-After"),
    )


@dataclasses.dataclass
class World:
    servers: OwnServers
    live: LiveStack
    away_s: float
    urls: list[str]
    admin: str
    doomed: list[tuple[str, str]]
    plain: list[str]

    def send(self, url: str, key: str, path: str, method: str = "GET", **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
        return httpx.request(method, url + path, headers=headers, timeout=30, **more)

    def chat(self, url: str, key: str) -> int:
        body = {"model": FAKE_NAME, "prompt": "x", "max_tokens": 2}
        response = self.send(url, key, "/v1/completions", "POST", json=body)
        self.accepted_if(response)
        return int(response.status_code)

    accepted: set[str] = dataclasses.field(default_factory=set)

    def accepted_if(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            self.accepted.add(response.headers["x-request-id"])

    @contextlib.contextmanager
    def load(self, *keys: str, **body: Any) -> Iterator[list[Load]]:
        """Steady requests with each key at each gateway."""
        loads = [Load(url, key, **body) for url in self.urls for key in keys]
        try:
            yield loads
        finally:
            for load in loads:
                load.stop()
                self.accepted |= {each.request_id for each in load.answers if each.status == 200}

    def revoke(self, url: str, public_id: str) -> None:
        path = f"/api/v1/keys/{public_id}/revoke"
        response = self.send(url, self.admin, path, "POST")
        assert response.status_code < 300, response.text

    def end_outage(self, kind: str) -> float:
        """-> when it was over."""
        if kind == "stop":
            self.servers.start_postgres()
        else:
            self.servers.thaw_postgres()
        return time.monotonic()

    def begin_outage(self, kind: str) -> float:
        """-> when it began."""
        at = time.monotonic()
        if kind == "stop":
            self.servers.stop_postgres()
        else:
            self.servers.freeze_postgres()
        return at


def start_webs(live: LiveStack, away_s: float) -> list[str]:
    # One with a pool of connections, as in Compose, and one without.
    return [
        live.start_web(
            f"away-{pool_size}",
            DATABASE_POOL_SIZE=pool_size,
            LORIKEET_DATABASE_AWAY_S=str(away_s),
        )[1]
        for pool_size in ("4", "0")
    ]


@pytest.fixture(scope="module")
def world(
    stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("away")
    away_s = getattr(request, "param", AWAY_S)
    with own_servers(folder, stack.env) as servers, live_stack(servers.env, folder) as live:
        live.start_worker("away")
        live.start_accountant()
        made = json.loads(live.run("manage.py", "shell", "--no-imports", "-c", SEED))
        yield World(servers, live, away_s, start_webs(live, away_s), **made)


def all_ok(loads: list[Load]) -> Callable[[], bool]:
    """Whether the latest answer of each is 200 and began after now."""
    now = time.monotonic()
    return lambda: all(
        any(answer.status == 200 for answer in load.since(now)[-1:]) for load in loads
    )


def assert_away(response: httpx.Response) -> None:
    """It is the API's own error."""
    assert response.status_code == 503, response.text
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["type"] == "server_error"
    assert "Traceback" not in response.text


def check_what_needs_rows(world: World, url: str) -> None:
    """All that reads or writes rows says 503, in its own form."""
    for key, path, method in (
        ("sk-nobody", "/v1/files", "GET"),
        (world.plain[0], "/v1/files", "GET"),
        (world.plain[0], "/v1/batches", "GET"),
        (world.admin, "/api/v1/keys", "GET"),
        (world.admin, "/api/v1/keys", "POST"),
    ):
        response = world.send(url, key, path, method)
        if key == "sk-nobody" and response.status_code == 401:
            continue  # its form says that it is no key
        assert_away(response)
    cookies = {"sessionid": "a" * 32}
    page = httpx.get(f"{url}/console/", cookies=cookies, timeout=30)
    assert page.status_code == 503, page.text
    assert int(page.headers["Retry-After"]) >= 1
    assert "<h1>Not available now</h1>" in page.text


def check_usage(world: World) -> None:
    """Each accepted request has one usage record and one line in the log, and no other has any."""

    def counts(table: str) -> dict[str, int]:
        with psycopg.connect(world.live.database_url) as connection:
            rows = connection.execute(f"select request_id, count(*) from {table} group by 1")
            return dict(rows.fetchall())

    for table in ("usage_usagerecord", "inference_inferencerequest"):
        wait_for(lambda table=table: set(counts(table)) >= world.accepted, what=f"all of {table}")
        assert counts(table) == dict.fromkeys(world.accepted, 1)


@pytest.mark.parametrize(
    ("kind", "turn"), [("stop", 0), pytest.param("freeze", 1, marks=pytest.mark.long)]
)
def test_who_is_known_goes_on_for_a_while(world: World, kind: str, turn: int) -> None:
    check_outage(world, kind, turn)


@pytest.mark.long
@pytest.mark.parametrize("world", [30.0], indirect=True)
def test_who_is_known_goes_on_for_thirty_seconds(world: World) -> None:
    check_outage(world, "stop", 0)
    check_outage(world, "freeze", 1)


def check_outage(world: World, kind: str, turn: int) -> None:
    public_id, doomed = world.doomed[turn]
    stranger = world.plain[2 + turn]  # valid, and seen by no gateway
    known = world.plain[0]
    with world.load(known, world.live.tenants["globex"].key) as loads:
        wait_for(all_ok(loads), timeout_s=30, what="steady load")
        for url in world.urls:
            assert world.chat(url, doomed) == 200
            assert world.send(url, known, "/v1/models").status_code == 200
        world.revoke(world.urls[0], public_id)
        began = world.begin_outage(kind)
        with world.load(doomed) as revoked:
            while time.monotonic() < began + world.away_s / 2:
                for url in world.urls:
                    models = world.send(url, known, "/v1/models")
                    assert models.status_code == 200, models.text
                    assert models.json()["data"]
                time.sleep(0.1)
            for url in world.urls:
                assert world.chat(url, stranger) == 503
                check_what_needs_rows(world, url)
        # Without an outage, too, another gateway may let it in for so long.
        let_in = [each for load in revoked for each in load.since(began + auth.CACHE_S)]
        assert let_in and {each.status for each in let_in} <= {401, 503}
        held = [
            answer
            for load in loads
            for answer in load.since(began, began + world.away_s - CONTACT_S)
        ]
        assert len(held) > 50
        assert {answer.status for answer in held} == {200}
        wait_for(
            lambda: all(load.answers[-1].status == 503 for load in loads),
            timeout_s=2 * world.away_s,
            what="the end of it",
        )
        ended = time.monotonic()
        assert ended > began + world.away_s - CONTACT_S
        time.sleep(0.7)
        refused = [answer for load in loads for answer in load.since(ended)]
        assert refused and {answer.status for answer in refused} == {503}
        assert all(int(answer.retry_after or 0) >= 1 for answer in refused)
        back = world.end_outage(kind)
        time.sleep(RETURN_S)
        wait_for(all_ok(loads), timeout_s=5, what="all being well")
        late = [answer for load in loads for answer in load.since(back + RETURN_S)]
        assert {answer.status for answer in late} == {200}
    for url in world.urls:
        assert world.chat(url, doomed) == 401
        assert world.send(url, world.admin, "/api/v1/keys").status_code == 200
    check_usage(world)
