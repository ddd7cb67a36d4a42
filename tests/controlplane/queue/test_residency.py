"""Where adapters are, what workers are asked for before a switch, and what is kept warm."""

from __future__ import annotations

import hashlib
import shlex
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from django.db import transaction
from django.test import Client

from contract.messages import protocol
from contract.messages.protocol import Control, ControlMessage, Tier
from contract.messages.worker_messages import told
from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases import ramps
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.services import alias_change, alias_create
from controlplane.queue.placement import residency as module
from controlplane.queue.placement import warmth
from controlplane.queue.placement.residency import (
    Prefetched,
    before_alias_switch,
    on_switch,
    prefetched,
    residency,
)
from controlplane.queue.placement.warmth import PINNED, WARM, Wanted, kept_warm, wanted, warmth_keep
from controlplane.tenancy.scoping import tenant_scope
from tests.conftest import ROOT
from tests.controlplane.adapters import test_promotion
from tests.controlplane.adapters.test_promotion import NAME, adapter
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.messages import make_heartbeat

__all__ = ["adapter"]


def add(adapter: Adapter, status: str = AdapterVersion.Status.READY) -> AdapterVersion:
    """The next version, with a digest that looks like one."""
    with transaction.atomic():
        version = test_promotion.add(adapter, status)
        version.digest = hashlib.sha256(str(version.pk).encode()).hexdigest()
        version.save()
    return version


class Pool:
    """The workers of a pool of its own, as they say that they are."""

    def __init__(self, settings: Any, base_model: str) -> None:
        settings.POOL = self.name = uuid.uuid4().hex[:8]
        self._base_model = base_model
        self.redis: Any = redis.Redis.from_url(settings.REDIS_URL, protocol=2)

    def beat(self, worker_id: str, *, silent_s: float = 0.0, **fields: Any) -> None:
        fields = {"base_model": self._base_model, "pool": self.name} | fields
        beat = make_heartbeat(worker_id=worker_id, **fields)
        self.redis.hset(protocol.worker_key(self.name, worker_id), "m", beat.encode())
        seconds, micros = self.redis.time()
        now = seconds + micros / 1e6
        self.redis.zadd(protocol.workers_key(self.name), {worker_id: now - silent_s})

    def has(self, worker_id: str, tier: Tier, *versions: AdapterVersion, **fields: Any) -> None:
        digests = tuple(version.digest for version in versions)
        field = {Tier.GPU: "resident_digests", Tier.HOST: "host_digests"}.get(tier, "disk_digests")
        self.beat(worker_id, **{field: digests if tier is Tier.GPU else told(digests)}, **fields)

    def asked(self, worker_id: str) -> list[ControlMessage]:
        key = protocol.control_key(self.name, worker_id)
        entries = self.redis.xrange(key)
        self.redis.delete(key)
        return [ControlMessage.decode(fields[protocol.PAYLOAD_FIELD]) for _, fields in entries]


@pytest.fixture
def pool(settings: Any, base_model: BaseModel) -> Iterator[Pool]:
    made = Pool(settings, base_model.name)
    yield made
    for key in made.redis.scan_iter(match=f"*{{{made.name}}}*"):
        made.redis.delete(key)
    made.redis.close()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What is to be kept warm."""
    found: list[Wanted] = []
    monkeypatch.setattr(warmth, "of_aliases", lambda: found)
    return found


def test_each_worker_says_where_a_version_is(
    acme: Party, globex: Party, adapter: Adapter, pool: Pool
) -> None:
    one, two = add(adapter), add(adapter)
    add(adapter, AdapterVersion.Status.REJECTED)
    pool.has("w-gpu", Tier.GPU, one, two, pinned_digests=(one.digest,))
    pool.has("w-host", Tier.HOST, one)
    pool.has("w-disk", Tier.DISK, one)
    pool.beat("w-cold")
    pool.has("w-other", Tier.GPU, one, base_model="another")
    pool.has("w-dead", Tier.GPU, one, silent_s=60.0)
    pool.has("w-loading", Tier.GPU, one, loading=True)
    body = as_key(acme).get(f"{NAME}/residency").json()
    assert (body["object"], body["adapter"], body["workers"]) == (
        "adapter_residency", "invoices", 4,
    )  # fmt: skip
    second, first = body["versions"]
    assert (second["version"], second["live"], second["counts"]) == (
        2, False, {"gpu": 1, "host": 0, "disk": 0, "cold": 3},
    )  # fmt: skip
    assert (first["version"], first["live"], first["digest"]) == (1, True, one.digest)
    assert first["counts"] == {"gpu": 1, "host": 1, "disk": 1, "cold": 1}
    places = {place["tier"]: place for place in first["workers"]}
    assert [places[tier]["pinned"] for tier in ("gpu", "host")] == [True, False]
    assert 0 <= places["gpu"]["seen_s"] < 10
    # Names are the same each time, and say nothing.
    assert "w-gpu" not in str(body)
    names = {place["worker"] for place in first["workers"]}
    assert names == {place["worker"] for place in second["workers"]} and len(names) == 4
    assert_error(as_key(globex).get(f"{NAME}/residency"), 404)
    assert as_user(acme.viewer).get(f"{NAME}/residency").status_code == 200
    stranger = AdapterVersion(tenant_id=globex.tenant.id, adapter=adapter, digest=one.digest)
    [of_stranger] = residency([stranger])
    assert not names & {place.worker for place in of_stranger.places}


def test_an_adapter_without_ready_versions_is_nowhere(
    acme: Party, adapter: Adapter, pool: Pool
) -> None:
    pool.beat("w")
    body = as_key(acme).get(f"{NAME}/residency").json()
    assert (body["workers"], body["versions"]) == (0, [])


def test_the_newest_versions_are_listed_and_the_live_one(
    acme: Party, adapter: Adapter, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.management.residency.MAX_VERSIONS", 2)
    pool.beat("w")
    for _ in range(4):
        add(adapter)
    rows = as_key(acme).get(f"{NAME}/residency").json()["versions"]
    assert [(row["version"], row["live"]) for row in rows] == [(4, False), (3, False), (1, True)]


def test_the_console_shows_it(acme: Party, adapter: Adapter, pool: Pool) -> None:
    one = add(adapter)
    precision = {"weights": "fp8", "kv": "bfloat16", "adapters": "float32", "kinds": {}}
    pool.has("w-1", Tier.GPU, one, pinned_digests=(one.digest,), precision=precision)
    pool.beat("w-2", precision=precision)
    browser = Client()
    browser.force_login(acme.viewer)
    for page in ("", "/versions/1"):
        text = browser.get(f"/console/adapters/invoices{page}").content.decode()
        assert "1 of 2 workers, pinned on 1" in text, page
        assert text.count("fp8, keys and values in bfloat16, adapters in float32") == 1, page
    pool.redis.delete(protocol.workers_key(pool.name))
    text = browser.get("/console/adapters/invoices").content.decode()
    assert "Where the workers" not in text


def test_the_console_says_and_sets_what_a_version_answers_in(
    acme: Party, adapter: Adapter, pool: Pool
) -> None:
    version, browser = add(adapter), Client()
    pool.has("w-1", Tier.GPU, version, precision={"weights": "fp8", "kv": "fp8", "adapters": "fp8"})
    browser.force_login(acme.owner)
    page = "/console/adapters/invoices/versions/1"

    def told() -> str:
        return browser.get(page).content.decode()

    assert "its original, until a probe compares" in told()
    AdapterVersion.objects.update(copy_nats=0.0125)
    assert "its copy in FP8" in told() and "is 0.0125 nats a token further" in told()
    browser.post(f"{page}/keep-original")
    assert "its original, as somebody asked" in told()
    browser.post(f"{page}/allow-copy")
    AdapterVersion.objects.update(copy_nats=3.0)
    assert "its copy in FP8 is off too far" in told()


def test_all_workers_of_the_base_are_asked(adapter: Adapter, pool: Pool) -> None:
    version = add(adapter)
    pool.beat("w-1")
    pool.has("w-2", Tier.HOST, version)
    pool.has("w-3", Tier.GPU, version)
    pool.beat("w-other", base_model="another")
    pool.beat("w-gone", silent_s=60.0)
    pool.beat("w-leaving", draining=True)
    assert prefetched([version], timeout_s=0.0) == Prefetched(workers=3, ready=1)
    for worker in ("w-1", "w-2"):
        [message] = pool.asked(worker)
        assert (message.action, message.tier, message.pin_s) == (Control.PREFETCH, Tier.GPU, 0.0)
        assert message.tenant_id == str(version.tenant_id)
        assert message.adapter is not None
        assert message.adapter.digest == version.digest
        assert message.adapter.tensors_key == version.tensors_key
    for worker in ("w-3", "w-other", "w-gone", "w-leaving"):
        assert pool.asked(worker) == []


def test_several_are_loaded_together(adapter: Adapter, pool: Pool) -> None:
    one, two = add(adapter), add(adapter)
    pool.has("w-1", Tier.GPU, one)
    pool.has("w-2", Tier.GPU, one, two)
    pool.beat("w-3")
    assert prefetched([one, two], timeout_s=0.0) == Prefetched(workers=3, ready=1)
    assert [len(pool.asked(f"w-{n}")) for n in (1, 2, 3)] == [1, 0, 2]


def test_before_an_alias_switches_all_that_it_names_is_loaded(adapter: Adapter, pool: Pool) -> None:
    one, two = add(adapter), add(adapter)
    add(adapter, AdapterVersion.Status.REJECTED)
    pool.has("w-1", Tier.GPU, one)
    both = (Part(adapter="invoices"), Part(adapter="invoices", version=2))
    assert before_alias_switch(both) == Prefetched(workers=1, ready=0)
    [message] = pool.asked("w-1")
    assert message.adapter is not None and message.adapter.digest == two.digest
    assert before_alias_switch(both[:1]) == Prefetched(workers=1, ready=1)
    assert before_alias_switch([Part(adapter="invoices", version=3)]) is None
    assert before_alias_switch([Part(adapter="nobody")]) is None


def test_aliases_over_http(acme: Party, adapter: Adapter, pool: Pool) -> None:
    one, two = add(adapter), add(adapter)
    pool.has("w-1", Tier.GPU, one, two)
    pool.has("w-2", Tier.GPU, one)
    client, url = as_key(acme), "/api/v1/aliases"
    half, full = ({"workers": 2, "ready": ready} for ready in (1, 2))

    def send(method: str, path: str, body: dict[str, Any], prefetched: Any) -> None:
        answer = getattr(client, method)(f"{url}{path}", body, format="json")
        assert answer.status_code in (200, 201), answer.content
        assert answer.json()["prefetched"] == prefetched, path

    send("post", "", {"name": "prod", "primary": {"adapter": "invoices"}}, full)
    canary = {"adapter": "invoices", "version": 2}
    send("patch", "/prod", {"canary": canary, "canary_percent": 5}, half)
    send("patch", "/prod", {"system_prompt": "Be brief."}, None)
    send("post", "/prod/ramp", {"percent": 10}, half)
    send("post", "/prod/ramp", {"percent": 0}, None)
    pool.asked("w-2")
    steps = {"steps": [{"percent": 5}]}
    assert client.put(f"{url}/prod/timetable", steps, format="json").status_code == 200
    assert [message.tier for message in pool.asked("w-2")] == [Tier.GPU]
    send("post", "/prod/promote-canary", {}, half)
    send("post", "/prod/rollback", {"revision": 1}, half)  # version 2 is live now
    bad = {"name": "x", "primary": {"adapter": "invoices", "version": 10**30}}
    assert_error(client.post(url, bad, format="json"), 400, "primary")
    assert_error(client.post(f"{url}/prod/rollback", {"revision": 99}, format="json"), 404)


def test_what_aliases_keep(adapter: Adapter, pool: Pool) -> None:
    one, two = add(adapter), add(adapter)
    target = (Part(adapter="invoices"), Part(adapter="invoices", version=2, weight=0.5))
    contents = Contents(primary=target, warmth="warm")
    alias = alias_create(name="prod", contents=contents)
    assert {(item.version, item.warmth) for item in wanted()} == {(one, "warm"), (two, "warm")}
    pool.beat("w-1")
    assert warmth_keep() == 2
    alias_change(alias=alias, changes={"primary": target[:1], "warmth": "pinned"})
    assert [(item.version, item.warmth) for item in wanted()] == [(one, "pinned")]
    promotion.adapter_version_promote(version=two)
    assert [(item.version, item.warmth) for item in wanted()] == [(two, "pinned")]
    AdapterVersion.objects.filter(pk=two.pk).update(status=AdapterVersion.Status.RETIRED)
    assert wanted() == []


def test_a_pool_without_workers_blocks_nobody(adapter: Adapter, pool: Pool) -> None:
    began = time.monotonic()
    assert prefetched([add(adapter)], timeout_s=60.0) == Prefetched(workers=0, ready=0)
    assert time.monotonic() - began < 30


def test_without_redis_nobody_waits(adapter: Adapter, pool: Pool, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    version = add(adapter)
    assert prefetched([version], timeout_s=60.0) == Prefetched(workers=0, ready=0)
    on_switch(version)


def test_nobody_waits_inside_a_transaction(adapter: Adapter, pool: Pool) -> None:
    """As this test is: its locks would last as long."""
    pool.beat("w-1")
    began = time.monotonic()
    assert prefetched([add(adapter)], timeout_s=60.0) == Prefetched(workers=1, ready=0)
    assert time.monotonic() - began < 30


def test_the_commands_of_the_documentation(acme: Party, adapter: Adapter, pool: Pool) -> None:
    one, two = add(adapter), add(adapter)
    pool.has("w-1", Tier.GPU, one, two)
    section = (ROOT / "docs" / "adapters.md").read_text().split("\n## Residency\n")[1]
    first, *lines = section.split("```sh\n")[1].split("```")[0].strip().splitlines()
    base = first.partition("=")[2].partition(";")[0]
    for line in lines:
        words = shlex.split(line.replace("$api", base))
        given = {words[i]: words[i + 1] for i in range(1, len(words)) if words[i] in ("-X", "-d")}
        [url] = [word for word in words if word.startswith("http")]
        answer = as_key(acme).generic(
            given.get("-X", "GET"),
            urlsplit(url).path,
            given.get("-d", ""),
            content_type="application/json",
        )
        assert answer.status_code == 200, (line, answer.content)
    assert [row["live"] for row in answer.json()["versions"]] == [True, False]


@pytest.mark.django_db(transaction=True)
class TestOutsideOfTransactions:
    def test_it_waits_for_all_workers(self, adapter: Adapter, pool: Pool) -> None:
        version = add(adapter)
        pool.beat("w-1")
        pool.beat("w-2")

        def load() -> None:
            time.sleep(0.3)
            pool.has("w-1", Tier.GPU, version)
            time.sleep(0.3)
            pool.beat("w-3")  # a third one comes meanwhile, and is asked too
            pool.has("w-2", Tier.GPU, version)
            time.sleep(0.3)
            pool.has("w-3", Tier.GPU, version)

        loading = threading.Thread(target=load)
        loading.start()
        found = prefetched([version], timeout_s=20.0)
        loading.join()
        assert found == Prefetched(workers=3, ready=3)
        assert [len(pool.asked(f"w-{n}")) for n in (1, 2, 3)] == [1, 1, 1]
        assert Adapter.objects.filter(pk=adapter.pk).exists(), "the connection came back"

    def test_it_gives_up_and_says_so(
        self, acme: Party, adapter: Adapter, pool: Pool, settings: Any
    ) -> None:
        settings.PREFETCH_WAIT_S = 0.3
        one, two = add(adapter), add(adapter)
        pool.has("w-1", Tier.GPU, one, two)
        pool.has("w-2", Tier.GPU, one)
        key = as_key(acme)
        answer = key.post(f"{NAME}/versions/2/promote").json()
        assert answer["prefetched"] == {"workers": 2, "ready": 1}
        assert answer["live_version"] == 2
        asked, held = pool.asked("w-2")
        assert (asked.tier, held.tier) == (Tier.GPU, Tier.HOST)
        again = key.post(f"{NAME}/versions/2/promote").json()
        assert again["prefetched"] is None, "it was live"
        back = key.post(f"{NAME}/rollback").json()
        assert (back["live_version"], back["prefetched"]) == (1, {"workers": 2, "ready": 2})
        browser = Client()
        browser.force_login(acme.owner)
        page = browser.post("/console/adapters/invoices/versions/2/promote", follow=True)
        assert "1 of 2 workers had loaded it by then." in page.content.decode()
        page = browser.post("/console/adapters/invoices/rollback", follow=True)
        assert "live again.</" in page.content.decode().replace(". <", ".<")

    def test_the_consoles_pages_of_aliases(
        self, acme: Party, adapter: Adapter, pool: Pool, settings: Any
    ) -> None:
        settings.PREFETCH_WAIT_S = 0.1
        one, two = add(adapter), add(adapter)
        pool.has("w-1", Tier.GPU, one, two)
        pool.has("w-2", Tier.GPU, one)
        pool.asked("w-2")
        browser = as_user(acme.owner)
        form = {"name": "prod", "primary": "invoices@1", "canary": "invoices@2"}
        form |= {"canary_percent": 5, "warmth": "cold"}

        def press(path: str, said: str = "", **body: Any) -> None:
            answer = browser.post(f"/console/{path}", body, follow=True)
            assert answer.status_code == 200
            assert said in answer.content.decode(), path
            asked = pool.asked("w-2")
            assert asked, path
            found = {(m.tier, m.adapter and m.adapter.digest) for m in asked}
            assert found == {(Tier.GPU, two.digest)}, path

        press("new-alias", **form)
        late = "1 of 2 workers had loaded it by then."
        press("aliases/prod/share", f"answers 10 % of the callers. {late}", percent=10)
        press("aliases/prod/edit", **form | {"canary_percent": 6})
        press("aliases/prod/ramp", f"begun. {late}", percents="7, 50", minutes=0, min_requests=0,
              at_end="stay")  # fmt: skip
        press("aliases/prod/promote", f"primary now. {late}")
        press("aliases/prod/rollback", f"is current again. {late}")
        press("aliases/prod/rollback", number=1)
        browser.post("/console/aliases/prod/share", {"percent": 0})
        assert pool.asked("w-2") == []

    def test_a_step_of_a_ramp_is_loaded_into_memory(self, adapter: Adapter, pool: Pool) -> None:
        one, two = add(adapter), add(adapter)
        contents = Contents(
            primary=(Part(adapter="invoices"),), canary=(Part(adapter="invoices", version=2),)
        )
        alias = alias_create(name="prod", contents=contents)
        steps = [{"percent": percent, "minutes": 0, "min_requests": 0} for percent in (5, 50)]
        ramps.ramp_start(alias=alias, steps=steps, at_end="stay")
        pool.beat("w-1")
        pool.asked("w-1")
        assert ramps.ramps_advance() == 1
        found = [(m.tier, m.adapter and m.adapter.digest) for m in pool.asked("w-1")]
        assert found == [(Tier.HOST, one.digest), (Tier.HOST, two.digest)]
        alias.refresh_from_db()
        assert alias.revision_number == 3

    def test_what_is_not_ready_is_not_loaded(
        self, acme: Party, adapter: Adapter, pool: Pool
    ) -> None:
        add(adapter)
        add(adapter, AdapterVersion.Status.REJECTED)
        pool.beat("w-1")
        pool.asked("w-1")
        assert_error(as_key(acme).post(f"{NAME}/versions/2/promote"), 409)
        assert pool.asked("w-1") == []

    def test_so_many_wait_at_a_time(self, adapter: Adapter, pool: Pool) -> None:
        version = add(adapter)
        pool.beat("w-1")
        waits = [module._Wait(str(version.tenant_id)) for _ in range(3)]
        allowed = [wait.__enter__().is_allowed for wait in waits]
        assert allowed == [True, True, False]
        assert module._Wait("another").__enter__().is_allowed
        began = time.monotonic()
        assert prefetched([version], timeout_s=60.0) == Prefetched(workers=1, ready=0)
        assert time.monotonic() - began < 30
        for wait in waits:
            wait.__exit__()
        assert module._Wait(str(version.tenant_id)).__enter__().is_allowed
        module._Wait._waiting.clear()

    def test_whatever_becomes_live_is_loaded(self, adapter: Adapter, pool: Pool) -> None:
        pool.beat("w-1")
        version = add(adapter)
        [message] = pool.asked("w-1")
        assert (message.tier, message.adapter and message.adapter.digest) == (
            Tier.HOST, version.digest,
        )  # fmt: skip
        promotion.promotion_policy_set(adapter=adapter, policy="immediate")
        add(adapter)
        assert len(pool.asked("w-1")) == 1


def test_what_a_worker_lacks_is_asked_for_again(
    adapter: Adapter, pool: Pool, kept: list[Wanted], settings: Any
) -> None:
    pinned, warm = add(adapter), add(adapter)
    kept += [Wanted(pinned, PINNED), Wanted(warm, WARM)]
    pool.beat("w-1")
    assert warmth_keep() == 2
    first, second = pool.asked("w-1")
    assert (first.tier, first.pin_s) == (Tier.GPU, 6 * settings.WARMTH_TURN_S)
    assert (second.tier, second.pin_s) == (Tier.HOST, 0.0)
    pool.beat(
        "w-1",
        resident_digests=(pinned.digest,),
        pinned_digests=(pinned.digest,),
        host_digests=told((warm.digest,)),
    )
    assert values() == {("pinned", "ready"): 1, ("warm", "ready"): 1}
    assert warmth_keep() == 1, "a pin ends unless it is asked for again"
    assert pool.asked("w-1")[0].pin_s > 0
    pool.beat("w-1", boot_id="restarted")
    assert values() == {("pinned", "missing"): 1, ("warm", "missing"): 1}
    assert warmth_keep() == 2
    pool.beat("w-1", draining=True)
    assert warmth_keep() == 0
    pool.beat("w-1", base_model="another")
    assert warmth_keep() == 0
    kept.clear()
    assert warmth_keep() == 0


def values() -> dict[tuple[str, str], float]:
    """The metric, without zeros."""
    [metric] = kept_warm()
    return {
        (sample.labels["warmth"], sample.labels["state"]): sample.value
        for sample in metric.samples
        if sample.value
    }


def test_a_tenant_has_so_many_kept_and_all_take_turns(
    acme: Party, globex: Party, adapter: Adapter, pool: Pool, kept: list[Wanted]
) -> None:
    own = [add(adapter) for _ in range(40)]
    kept += [Wanted(version, PINNED) for version in own[:20]]
    kept += [Wanted(version, WARM) for version in own]
    with tenant_scope(globex.tenant.id):
        others = Adapter.objects.create(name="letters", base_model=adapter.base_model)
        theirs = add(others)
    kept += [Wanted(theirs, PINNED), Wanted(theirs, PINNED)]
    pool.beat("w-1")
    sent = warmth_keep()
    assert sent == 4 + 16 + 1
    messages = pool.asked("w-1")
    assert str(globex.tenant.id) in {message.tenant_id for message in messages[:3]}
    assert sum(message.pin_s > 0 for message in messages) == 4 + 1
