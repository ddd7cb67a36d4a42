"""Aliases switch under load, over two gateways; and a gateway is killed while it switches one.

The gateways, the worker and the accountant are real processes; the engine's answers show which
version gave each of their tokens.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from controlplane.aliases.resolution import bucket
from tests.live import LiveStack, Process, wait_for

pytestmark = [pytest.mark.long, pytest.mark.alone]

NUM_SWITCHES = 40
NUM_TOKENS = 24
#: What the documentation promises.
EFFECTIVE_S = 1.0
#: Tokens of the fake base, one for each version.
TOKENS = (70, 71, 72)
SEED = """
import json, sys, django
django.setup()
from django.db import transaction
from contract.messages.protocol import adapter_digest
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.adapters.promotion import lock, ready_apply
from controlplane.infra import storage
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Role, ServiceAccount, Tenant
from tests.fakes import FAKE_NAME, FAKE_REVISION
slug = sys.argv[2]
tenant = Tenant.objects.filter(slug=slug).first() or services.tenant_create(slug=slug, name=slug)
with tenant_scope(tenant.id):
    account = ServiceAccount.objects.create(name="publisher", role=Role.OWNER)
    rules = KeyRules(scopes=("infer", "read", "adapters:write"))
    _, key = services.api_key_create(name="publisher", rules=rules, owner=account)
    base = BaseModel.objects.get(name=FAKE_NAME)
    adapter = Adapter.objects.create(name="switched", base_model=base)
    for number, token in enumerate(json.loads(sys.argv[1]), 1):
        config, tensors = {"token": token}, b"tensors of %d" % token
        version = AdapterVersion.objects.create(
            adapter=adapter, number=number, status="ready", num_bytes=len(tensors),
            digest=adapter_digest(config, [tensors], FAKE_REVISION))
        storage.put_bytes(version.config_key, json.dumps(config).encode())
        storage.put_bytes(version.tensors_key, tensors)
        with transaction.atomic():
            ready_apply(lock(adapter.pk), version)
print(key)
"""


@dataclasses.dataclass
class World:
    pool: LiveStack
    gateways: list[tuple[Process, str]]
    key: str

    def api(self, method: str, path: str, body: Any = None, *, at: int = 0) -> Any:
        answer = httpx.request(
            method,
            f"{self.gateways[at][1]}/api/v1/aliases{path}",
            json=body,
            headers=self.headers,
            timeout=30,
        )
        assert answer.status_code < 300, answer.text
        return answer.json() if answer.content else None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.pool.database_url) as connection:
            return connection.execute(query, parameters).fetchall()


@pytest.fixture(scope="module")
def world(live: LiveStack) -> Iterator[World]:
    pool = live.with_pool("aliases")
    pool.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    key = pool.run("-c", SEED, json.dumps(TOKENS), "acme").strip()
    worker = pool.start_worker("alias-worker", step_s=0.005)
    accountant = pool.start_accountant("alias-accountant")
    gateways = [pool.start_web(f"alias-{index}", DATABASE_POOL_SIZE="4") for index in range(2)]
    yield World(pool, gateways, key)
    for process in (worker, accountant, *(process for process, _ in gateways)):
        process.end()


@dataclasses.dataclass(frozen=True)
class Answer:
    """One streamed answer. began: when it was asked for, in seconds of time.monotonic."""

    user: str
    began: float
    request_id: str
    revision: int
    target: str
    texts: frozenset[str]
    num_tokens: int


def ask(client: httpx.Client, user: str, model: str = "prod") -> Answer:
    """Stream an answer to its end. Fails the test if it has none."""
    began, texts, num_tokens, is_done = time.monotonic(), [], 0, False
    body = {
        "model": model,
        "user": user,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                assert chunk["model"] == model
                for choice in chunk["choices"]:
                    texts.append(choice["delta"].get("content") or "")
                if chunk.get("usage"):
                    num_tokens = chunk["usage"]["completion_tokens"]
    assert is_done, "the stream was cut"
    text = "".join(texts)
    return Answer(
        user=user,
        began=began,
        request_id=answer.headers["x-request-id"],
        revision=int(answer.headers.get("x-lorikeet-alias-revision", 0)),
        target=answer.headers.get("x-lorikeet-alias-target", ""),
        texts=frozenset(text[at : at + 1] for at in range(len(text))),
        num_tokens=num_tokens,
    )


class Load:
    """Callers that ask without a pause, each now at one gateway, now at the other."""

    def __init__(self, world: World, num_callers: int) -> None:
        self.answers: list[Answer] = []
        self.failures: list[BaseException] = []
        self._world = world
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(num_callers)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        drawn = random.Random(index)
        try:
            clients = [
                httpx.Client(base_url=url, headers=self._world.headers, timeout=60)
                for _, url in self._world.gateways
            ]
            while not self._stop.is_set():
                client = drawn.choice(clients)
                self.answers.append(ask(client, f"caller {drawn.randrange(200)}"))
        except BaseException as error:
            self.failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def letters_of(world: World) -> dict[int, frozenset[str]]:
    """What each version says."""
    with httpx.Client(base_url=world.gateways[0][1], headers=world.headers, timeout=60) as client:
        found = {number: ask(client, "x", f"switched@{number}").texts for number in (1, 2, 3)}
    assert all(len(texts) == 1 for texts in found.values())
    assert len(set(found.values())) == 3
    return found


def switch(world: World, drawn: random.Random, revision: int) -> dict[str, Any]:
    """Switch the alias at one of the gateways, in one of all ways."""
    at = drawn.randrange(2)
    ways = [
        ("PATCH", "/prod", {"primary": {"adapter": "switched", "version": drawn.randint(1, 3)}}),
        ("PATCH", "/prod", {"primary": {"adapter": "switched"}}),
        ("POST", "/prod/ramp", {"percent": drawn.choice([0, 1, 10, 50, 100])}),
        ("POST", "/prod/promote-canary", {}),
        ("POST", "/prod/rollback", {}),
    ]
    current = world.api("GET", "/prod", at=at)
    if not current["canary"]:
        version = drawn.randint(1, 3)
        canary = {"adapter": "switched", "version": version}
        ways = [("PATCH", "/prod", {"canary": canary, "canary_percent": drawn.randint(1, 99)})]
    method, path, body = drawn.choice(ways)
    said: dict[str, Any] = world.api(method, path, {**body, "if_revision": revision}, at=at)
    return said


def test_forty_switches_under_load(world: World) -> None:
    """No request fails, no answer mixes versions, each caller is answered as its place says."""
    letters = letters_of(world)
    drawn = random.Random(18)
    made = world.api("POST", "", {"name": "prod", "primary": {"adapter": "switched"}})
    alias_id, revision = uuid.UUID(made["id"]), 1
    #: By revision: when it was answered, and which version is live then.
    since, live = {1: time.monotonic()}, {1: 1}
    load = Load(world, 8)
    while len(since) <= NUM_SWITCHES:
        time.sleep(drawn.uniform(0.05, 0.4))
        said = switch(world, drawn, revision)
        if said["revision"] != revision:
            revision = said["revision"]
            since[revision] = time.monotonic()
            [row] = world.rows(
                "select version.number from adapters_adapter adapter join adapters_adapterversion "
                "version on version.id = adapter.live_version_id where adapter.name = 'switched'"
            )
            live[revision] = row[0]
    time.sleep(EFFECTIVE_S + 3)
    load.stop()
    assert load.failures == []
    says = {number: world.api("GET", f"/prod/revisions/{number}") for number in since}
    for answer in load.answers:
        assert answer.num_tokens == NUM_TOKENS
        said = says[answer.revision]
        place = bucket(alias_id, f"user {answer.user}")
        is_canary = bool(said["canary"]) and place < said["canary_percent"]
        assert answer.target == ("canary" if is_canary else "primary"), (answer, said)
        [part] = said[answer.target]
        # What is live may have moved while a gateway had the revision of before in memory.
        versions = {part["version"]} if part["version"] else set(live.values())
        assert answer.texts in [letters[number] for number in versions], (answer, said)
        begun_after = [number for number, at in since.items() if answer.began > at + EFFECTIVE_S]
        assert answer.revision >= max(begun_after, default=1), "an old revision answered"
    assert {answer.revision for answer in load.answers if answer.began > since[revision] + 1} == {
        revision
    }
    check_records(world, load.answers, says)


def check_records(world: World, answers: list[Answer], says: dict[int, dict[str, Any]]) -> None:
    """Each answer's log line has the revision, the target and the version."""
    query = (
        "select request_id, alias_revision_id, alias_target, number "
        "from inference_inferencerequest "
        "join adapters_adapterversion version on version.id = adapter_version_id "
        "where request_id = any(%s)"
    )
    ids = [answer.request_id for answer in answers]
    wait_for(lambda: len(world.rows(query, ids)) == len(ids), timeout_s=60, what="the records")
    by_id = {row[0]: row[1:] for row in world.rows(query, ids)}
    for answer in answers:
        said = says[answer.revision]
        revision_id, target, number = by_id[answer.request_id]
        assert (str(revision_id), target) == (said["id"], answer.target)
        [part] = said[target]
        assert part["version"] in (None, number)


def test_models_and_other_faces(world: World) -> None:
    """An alias is listed, tokenized, answered as a response and by LoRAX's address; not retired."""
    blend = [{"adapter": "switched", "version": 3}, {"adapter": "acme-adapter", "weight": 0.5}]
    body = {"name": "faces", "primary": blend, "system_prompt": "Be brief."}
    world.api("POST", "", body)
    url = world.gateways[1][1]
    with httpx.Client(base_url=url, headers=world.headers, timeout=60) as client:
        listed = client.get("/v1/models").json()["data"]
        assert "faces" in [model["id"] for model in listed]
        assert client.get("/v1/models/faces").json()["version"] is None
        for model, code in (("faces", "is_alias"), ("switched@3", "used_by_alias")):
            answer = client.delete(f"/v1/models/{model}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        counts = {
            model: client.post("/tokenize", json={"model": model, **chat}).json()["count"]
            for model in ("faces", "acme-adapter")
        }
        assert counts["faces"] > counts["acme-adapter"], "the system prompt counts"
        response = client.post("/v1/responses", json={"model": "faces", "input": "x"})
        lorax = client.post(
            "/generate", json={"inputs": "x", "parameters": {"adapter_id": "faces"}}
        )
        for answer in (response, lorax):
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-lorikeet-alias-revision"] == "1"


def test_the_split_is_what_was_set(world: World) -> None:
    """Within five standard deviations, at both gateways; raising it moves callers one way."""
    world.api("POST", "", {"name": "split", "primary": {"adapter": "switched", "version": 1}})
    canary = {"adapter": "switched", "version": 2}
    num_callers, before = 300, set()
    for percent in (10, 50):
        world.api("PATCH", "/split", {"canary": canary, "canary_percent": percent})
        time.sleep(EFFECTIVE_S)
        chosen = []
        for _, url in world.gateways:
            with httpx.Client(base_url=url, headers=world.headers, timeout=60) as client:
                targets = {user: target_of(client, f"u{user}") for user in range(num_callers)}
            chosen.append({user for user, target in targets.items() if target == "canary"})
        assert chosen[0] == chosen[1], "a caller is answered alike everywhere"
        deviation = (num_callers * percent * (100 - percent)) ** 0.5 / 100
        assert abs(len(chosen[0]) - num_callers * percent / 100) <= 5 * deviation
        assert before <= chosen[0]
        before = chosen[0]


def target_of(client: httpx.Client, user: str) -> str:
    body = {"model": "split", "user": user, "prompt": "x", "max_tokens": 1}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-lorikeet-alias-target"]


def test_of_changes_at_the_same_time_one_wins(world: World) -> None:
    world.api("POST", "", {"name": "raced", "primary": {"adapter": "switched", "version": 1}})

    def change(number: int) -> int:
        url = f"{world.gateways[number % 2][1]}/api/v1/aliases/raced"
        body = {"system_prompt": f"{number}", "if_revision": 1}
        return httpx.patch(url, json=body, headers=world.headers, timeout=30).status_code

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(change, range(8))) == [200] + [409] * 7
    check_whole(world, "raced", num_parts=1)


def test_a_gateway_is_killed_during_a_switch(world: World) -> None:
    """What is left is one whole revision, and every gateway answers by it."""
    world.api("POST", "", {"name": "killed", "primary": {"adapter": "switched", "version": 1}})
    canary = {"adapter": "switched", "version": 2}
    world.api("PATCH", "/killed", {"canary": canary, "canary_percent": 1})
    drawn = random.Random(9)
    for turn in range(6):
        doomed, url = world.pool.start_web(f"doomed-{turn}", DATABASE_POOL_SIZE="2")
        stop = threading.Event()

        def switch_on(url: str = url, stop: threading.Event = stop) -> None:
            percent = 0
            with httpx.Client(headers=world.headers, timeout=10) as client:
                while not stop.is_set():
                    percent = percent % 100 + 1
                    path = f"{url}/api/v1/aliases/killed/ramp"
                    try:
                        client.post(path, json={"percent": percent})
                    except httpx.HTTPError:
                        return

        thread = threading.Thread(target=switch_on, daemon=True)
        thread.start()
        time.sleep(0.5 + drawn.random() * 0.5)
        doomed.kill()
        stop.set()
        thread.join(30)
        check_whole(world, "killed", num_parts=2)


def check_whole(world: World, name: str, *, num_parts: int) -> None:
    time.sleep(EFFECTIVE_S)
    current = world.api("GET", f"/{name}")
    for _, url in world.gateways:
        with httpx.Client(base_url=url, headers=world.headers, timeout=60) as client:
            assert ask(client, "x", name).revision == current["revision"]
    query = (
        "select revision.number, count(part.id) from aliases_aliasrevision revision "
        "join aliases_alias alias on alias.id = revision.alias_id "
        "left join aliases_aliaspart part on part.revision_id = revision.id "
        "where alias.name = %s group by revision.number order by 1"
    )
    rows = world.rows(query, name)
    last = current["revision"]
    first = max(1, last - 199)
    assert [number for number, _ in rows] == list(range(first, last + 1))
    assert {count for number, count in rows if number > 1} == {num_parts}
    [(num_events,)] = world.rows(
        "select count(*) from audit_auditevent event join aliases_alias alias "
        "on event.resource_id = alias.id::text where alias.name = %s",
        name,
    )
    assert num_events == last, "one event for each revision"
