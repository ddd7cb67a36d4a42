"""More than the pool can do, with real processes: overload, a flood, a budget, a zombie."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from contract.messages import protocol
from contract.messages.protocol import DoneRecord, Sampling
from contract.queue import fair_queue
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, Process, wait_for
from tests.queue_rig import QueueRig
from worker.serving.requests import LOOKAHEAD

log = logging.getLogger(__name__)

TOKENS = 20  # of an answer
STEP_S = 0.02
MOST_TOKENS = 40  # of an answer out of a budget
MIB = 2**20


@dataclasses.dataclass
class Site:
    """A pool of a test's own."""

    live: LiveStack
    processes: list[Process]

    def web(self, **env: str) -> str:
        process, url = self.live.start_web(f"web-{self.live.pool}", **env)
        self.processes.append(process)
        return url

    def worker(self, name: str = "w", **options: Any) -> Process:
        process = self.live.start_worker(name, **options)
        self.processes.append(process)
        return process

    def accountant(self) -> None:
        self.processes.append(self.live.start_accountant(f"accountant-{self.live.pool}"))

    def done(self) -> list[DoneRecord]:
        entries = self.live.redis.xrange(protocol.done_key(self.live.pool))
        return [DoneRecord.decode(fields[b"m"]) for _, fields in entries]


@pytest.fixture
def site(live: LiveStack) -> Iterator[Site]:
    made = Site(live.with_pool(f"p{uuid.uuid4().hex[:6]}"), [])
    yield made
    for process in made.processes:
        process.end()
    client: Any = made.live.redis
    keys = list(client.scan_iter(f"*{{{made.live.pool}}}*", count=5000))
    for at in range(0, len(keys), 1000):
        client.delete(*keys[at : at + 1000])


@dataclasses.dataclass(frozen=True)
class Answer:
    status: int
    code: str | None
    retry_after: str | None
    should_retry: str | None
    sent_at: float
    ended_at: float
    num_tokens: int


def body_of(max_tokens: int = TOKENS, *, stream: bool = False) -> dict[str, Any]:
    return {
        "model": FAKE_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }


async def ask(
    client: httpx.AsyncClient, url: str, key: str, max_tokens: int = TOKENS, *, stream: bool = False
) -> Answer:
    sent_at = time.monotonic()
    response = await client.post(
        f"{url}/v1/chat/completions",
        json=body_of(max_tokens, stream=stream),
        headers={"Authorization": f"Bearer {key}"},
    )
    parsed = {} if stream and response.status_code == 200 else response.json()
    return Answer(
        status=response.status_code,
        code=parsed.get("error", {}).get("code"),
        retry_after=response.headers.get("retry-after"),
        should_retry=response.headers.get("x-should-retry"),
        sent_at=sent_at,
        ended_at=time.monotonic(),
        num_tokens=parsed.get("usage", {}).get("completion_tokens", 0),
    )


def a_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))


def tokens_per_s(answers: list[Answer], begin: float, end: float) -> float:
    """Of whole answers that ended between two moments."""
    inside = [answer.num_tokens for answer in answers if begin <= answer.ended_at < end]
    return sum(inside) / (end - begin)


async def saturate(url: str, keys: list[str], seconds: float) -> float:
    """The tokens a second that clients get who wait for each answer before they ask again."""
    answers: list[Answer] = []
    begin = time.monotonic()
    async with a_client() as client:

        async def loop(key: str) -> None:
            while time.monotonic() < begin + seconds:
                answers.append(await ask(client, url, key))

        await asyncio.gather(*(loop(keys[number % 2]) for number in range(12)))
    assert {answer.status for answer in answers} == {200}
    return tokens_per_s(answers, begin + 2, begin + seconds)


async def overload(url: str, keys: list[str], rate: float, seconds: float) -> list[Answer]:
    """Requests at a steady rate, whatever becomes of them."""
    tasks = []
    begin = time.monotonic()
    async with a_client() as client:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(begin + number / rate - time.monotonic())
            tasks.append(asyncio.create_task(ask(client, url, keys[number % 2])))
        return await asyncio.gather(*tasks)


@pytest.mark.long
@pytest.mark.alone
def test_five_times_too_much_is_refused_and_the_rest_is_served(site: Site) -> None:
    url = site.web(LORIKEET_MAX_WAIT_S="2")
    site.worker(step_s=STEP_S, max_running=4)
    site.accountant()
    keys = [site.live.tenants[name].key for name in ("acme", "globex")]
    capacity = asyncio.run(saturate(url, keys, 8))
    memory: list[list[int]] = []
    stop = threading.Event()

    def watch() -> None:
        families = [psutil.Process(process.pid) for process in site.processes]
        while not stop.wait(0.5):
            sizes = [process.memory_info().rss for process in families]
            memory.append([*sizes, site.live.redis.info("memory")["used_memory"]])

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    answers = asyncio.run(overload(url, keys, 5 * capacity / TOKENS, 12))
    stop.set()
    watcher.join()

    refused = [answer for answer in answers if answer.status != 200]
    served = [answer for answer in answers if answer.status == 200]
    assert {(answer.status, answer.code) for answer in refused} <= {
        (429, "slow_down"),
        (503, "server_is_overloaded"),
    }
    assert len(refused) > len(answers) / 2
    assert all(1 <= int(answer.retry_after or 0) <= 60 for answer in refused)
    goodput = tokens_per_s(served, begin + 1, begin + 12)
    log.info(
        "capacity %.0f, goodput %.0f tokens/s of %s",
        capacity,
        goodput,
        Counter(answer.code for answer in answers),
    )
    assert goodput >= 0.9 * capacity, (goodput, capacity)
    # An answer takes 0.4 s; what was let in waits no longer than it was said to.
    slowest = max(answer.ended_at - answer.sent_at for answer in served)
    assert slowest < 2 * 2 + 0.4 + 1, slowest
    assert statistics.median(answer.ended_at - answer.sent_at for answer in refused) < 0.5
    for series in zip(*memory, strict=True):
        assert max(series) - series[len(series) // 4] < 16 * MIB, series


@pytest.mark.long
@pytest.mark.alone
def test_a_flood_of_10000_does_not_keep_a_trickle_waiting(site: Site) -> None:
    url = site.web()
    slots = 8
    site.worker(step_s=STEP_S, max_running=slots)
    rig = QueueRig(site.live.redis_url, pool=site.live.pool, base=FAKE_NAME)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    for _ in range(10_000):
        job = dataclasses.replace(
            rig.job(site.live.tenants["globex"].id),
            **{"base_model": FAKE_NAME, "gateway_id": "", "sampling": sampling},
        )
        rig.admit(job)
    rig.close()
    beats = []

    async def trickle() -> list[float]:
        waits = []
        async with a_client() as client:
            for _ in range(12):
                answer = await ask(client, url, site.live.tenants["acme"].key)
                assert answer.status == 200, answer
                waits.append(answer.ended_at - answer.sent_at)
                beats.append(site.live.heartbeat("w"))
                await asyncio.sleep(0.3)
        return waits

    begin, before = time.monotonic(), len(site.done())
    waits = asyncio.run(trickle())
    seconds = time.monotonic() - begin
    # As the pool really goes on this machine; it is always full, so an answer ends as one begins.
    ended = len(site.done()) - before
    dispatch_s = seconds / ended
    step_s = dispatch_s * slots / TOKENS
    # Room, then as many dispatches as the queue says, what is prepared already, and its own run.
    bound = (1 + fair_queue.MAX_SKIPS + 1 + LOOKAHEAD) * dispatch_s + TOKENS * step_s
    log.info("waits %s, bound %.2f s, %d answers in %.1f s", waits, bound, ended, seconds)
    assert max(waits) < bound + 0.5, (waits, bound)
    assert step_s < 1.5 * STEP_S, "the pool was not busy"
    # A heartbeat's `running` is that of one step, and all slots may just have ended together.
    taken = {beat.step: beat for beat in beats if beat is not None}
    running = [
        after.tokens_per_s * protocol.HEARTBEAT_INTERVAL_S / (after.step - before.step)
        for before, after in itertools.pairwise(taken.values())
    ]
    assert statistics.mean(running) >= 0.9 * slots, running
    left = site.live.redis.hget(f"{fair_queue.queue_key(site.live.pool, FAKE_NAME)}:sums", "n")
    assert int(left) > 9000, "the flood was over before the trickle"


#: argv: tenant, tokens a month
BUDGET = """
import os, sys, uuid
os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
import django
django.setup()
from controlplane.usage.limits.services import budget_set
from controlplane.tenancy.scoping import tenant_scope
with tenant_scope(uuid.UUID(sys.argv[1])):
    print(budget_set(period="month", hard_limit=int(sys.argv[2])).id.hex)
"""


@dataclasses.dataclass
class Purse:
    """A tenant with a budget, in a pool of its own."""

    site: Site
    tenant_id: str
    key: str
    peak: int = 0

    @classmethod
    def made(cls, site: Site, hard: int) -> Purse:
        slug = f"thrifty-{site.live.pool}"
        tenant = site.live.run("manage.py", "tenant_create", "--slug", slug, "--name", "T")
        key = site.live.run("manage.py", "api_key_create", "--tenant", slug, "--name", "k")
        purse = cls(site, json.loads(tenant)["id"], json.loads(key)["key"])
        site.live.run("-c", BUDGET, purse.tenant_id, str(hard))
        return purse

    def state(self) -> tuple[int, int]:
        """Tokens spent and reserved."""
        pattern = f"bud:{{{self.site.live.pool}}}:*"
        found = list(self.site.live.redis.scan_iter(pattern, count=5000))
        spent, reserved = self.site.live.redis.hmget(found[0], "spent", "reserved")
        return int(spent or 0), int(reserved or 0)

    def billed(self) -> tuple[int, int]:
        """Requests and tokens, by the records."""
        with psycopg.connect(self.site.live.database_url) as connection:
            row = connection.execute(
                "select count(*), sum(prompt_tokens + completion_tokens) from usage_usagerecord"
                " where tenant_id = %s",
                (self.tenant_id,),
            ).fetchone()
        assert row is not None
        return int(row[0]), int(row[1])

    async def spend(self, client: httpx.AsyncClient, url: str, number: int) -> Answer:
        """Ask until the budget says no. -> how it says so"""
        chance = random.Random(number)
        while True:
            tokens, stream = chance.randrange(1, MOST_TOKENS), chance.random() < 0.3
            answer = await ask(client, url, self.key, tokens, stream=stream)
            self.peak = max(self.peak, sum(await asyncio.to_thread(self.state)))
            if answer.code == "insufficient_quota":
                return answer
            # A stream is not read here; what ran alone when the worker died is given up.
            assert answer.status == 200 or answer.code == "request_given_up", answer


async def crash(site: Site, times: int) -> None:
    """End the pool's only worker and start it again, again and again."""
    for _ in range(times):
        await asyncio.sleep(2)
        site.processes[-1].end()
        await asyncio.to_thread(site.worker, step_s=STEP_S, wait=False)


def test_a_budget_is_not_overspent_though_workers_die(site: Site) -> None:
    hard, num_clients, crashes = 6_000, 12, 2
    purse = Purse.made(site, hard)
    url = site.web()
    site.accountant()
    site.worker(step_s=STEP_S)

    async def play() -> list[Answer]:
        async with a_client() as client:
            assert (await ask(client, url, purse.key)).status == 200  # Redis knows the budget now
            crashing = asyncio.create_task(crash(site, crashes))
            spending = [purse.spend(client, url, number) for number in range(num_clients)]
            last = await asyncio.gather(*spending)
            assert crashing.done(), "the budget was spent before the worker died"
            return last

    last = asyncio.run(play())
    assert {(answer.status, answer.should_retry) for answer in last} == {(429, "false")}
    wait_for(lambda: purse.state()[1] == 0, what="the end of what ran", timeout_s=30)
    wait_for(lambda: not site.done(), what="the accountant")
    rows, billed = purse.billed()
    log.info("%d requests billed %d of %d, at most %d held", rows, billed, hard, purse.peak)
    assert purse.state()[0] == billed
    assert billed <= hard
    assert purse.peak <= hard
    # It was of use: what is left is what the last ones had reserved beyond their use.
    assert billed > 0.8 * hard
    site.live.run("manage.py", "usage_totals")


def test_a_zombie_changes_nothing(site: Site) -> None:
    """A worker paused past its lease wakes when another has done its work."""
    url = site.web()
    zombie = site.worker("zombie", step_s=STEP_S)
    key = site.live.tenants["acme"].key
    client: Any = site.live.redis
    outs = set()  # where the gateway reads; a job that is done no longer says

    async def call() -> list[Answer]:
        async with a_client() as http:
            calls = [asyncio.create_task(ask(http, url, key, 80)) for _ in range(4)]
            inbox = protocol.inbox_key(site.live.pool, "zombie")
            while client.xlen(inbox) < 4:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)  # the engine is at it
            for job in client.scan_iter(protocol.job_key(site.live.pool, "*")):
                outs.add(protocol.out_key(client.hget(job, "gateway").decode()))
            os.killpg(zombie.pid, signal.SIGSTOP)
            await asyncio.to_thread(site.worker, "heir", step_s=STEP_S)
            return await asyncio.gather(*calls)

    answers = asyncio.run(call())
    assert [(answer.status, answer.num_tokens) for answer in answers] == [(200, 80)] * 4
    records = site.done()
    assert Counter((r.worker_id, r.lease > 1, r.completion_tokens) for r in records) == {
        ("heir", True, 80): 4
    }
    jobs = {
        record.request_id: client.hgetall(protocol.job_key(site.live.pool, record.request_id))
        for record in records
    }
    (out,) = outs
    before = client.xrange(out)
    os.killpg(zombie.pid, signal.SIGCONT)
    wait_for(lambda: "was taken over" in zombie.log.read_text(), what="the refusal")
    wait_for(lambda: client.xlen(protocol.inbox_key(site.live.pool, "zombie")) == 0, what="acks")
    beat = site.live.heartbeat("zombie")
    time.sleep(2.5)  # beyond its next heartbeat and every flush of what it had
    assert site.live.heartbeat("zombie") != beat, "it did not wake"
    said = [
        event
        for _, fields in client.xrange(out)
        if (_, fields) not in before
        for event in protocol.unpack_events(fields[b"m"])
    ]
    assert said == []
    assert site.done() == records
    for request_id, job in jobs.items():
        assert client.hgetall(protocol.job_key(site.live.pool, request_id)) == job
    site.accountant()
    for record in records:
        assert site.live.usage_row(record.request_id)["completion_tokens"] == 80
    # Nor is it harmed: it works on.
    assert zombie.exit_code is None
