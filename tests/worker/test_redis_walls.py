"""What two tenants leave in a real Redis: whose each key and record is, and who can read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import pytest
import redis

from contract.messages import protocol
from contract.messages.protocol import DoneRecord, GenerateJob
from tests.live import LiveStack, Process, wait_for

NAMES = ("acme", "globex")
POOL = "walls"
#: Limits and a budget for each tenant, so that their counters are there too.
LIMITS = """
import django; django.setup()
from controlplane.usage.limits.services import budget_set, rate_limit_set
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant
for tenant in Tenant.objects.all():
    with tenant_scope(tenant.id):
        rate_limit_set(requests_per_minute=500, tokens_per_minute=10**6, max_concurrent=50,
                       max_waiting=50)
        budget_set(hard_limit=10**9)
"""
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
P = re.escape(f"{{{POOL}}}")
#: Keys with a tenant's id in them.
OF_A_TENANT = [
    rf"q:{P}:[^:]+:[ib]:(?P<tenant>{UUID})",
    rf"lim:{P}:(?P<tenant>{UUID}):[0-9a-f]{{32}}(?::run|:wait)?",
    rf"bud:{P}:(?P<tenant>{UUID}):[0-9a-f]{{32}}:\d+",
    rf"epochs:(?P<tenant>{UUID})",
]
#: Keys whose every record says, or leads to, its tenant.
OF_RECORDS = [rf"job:{P}:.+", rf"in:{P}:.+", rf"done:{P}", rf"dlq:{P}", r"out:.+"]
#: Keys of the platform: names of workers and digests, sums of tokens by tenant, counters of
#: attempts to sign in by hash.
OF_NOBODY = [
    *(rf"wk:{P}(?::.+)?", rf"ctl:{P}:.+", rf"res:{P}:.+", rf"in:{P}", rf"qs:{P}", rf"srv:{P}"),
    *(
        rf"quar:{P}",
        rf"reap:{P}",
        "aof:rewritten",
        r"epochs(?::\*)?",
        rf"q:{P}:[^:]+:(?:sums|idle|[ib](?::(?:skip|vt))?)",
        r"cache:1:.+",
        "gw",
        "webhooks:(turn|again)",
    ),
]


def words(name: str) -> str:
    return f"the words of {name} that nobody else may read"


@pytest.fixture(scope="module")
def walled(live: LiveStack) -> Iterator[LiveStack]:
    """A pool on a Redis database that holds nothing else."""
    other = live.with_pool(POOL)
    other.redis_url = urlunsplit(urlsplit(live.redis_url)._replace(path="/12"))
    other.env = {**other.env, "REDIS_URL": other.redis_url}
    other.redis = redis.Redis.from_url(other.redis_url, protocol=2)
    other.redis.flushdb()
    other.env["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    other.run("-c", LIMITS)
    yield other
    other.redis.flushdb()
    other.redis.close()


@pytest.fixture(scope="module")
def traffic(walled: LiveStack) -> Iterator[tuple[LiveStack, str]]:
    """Of both tenants: answers that ended, that are under way, that wait, and one that failed.

    No accountant has cleaned up after them.
    """
    processes: list[Process] = []
    process, url = walled.start_web("web")
    processes.append(process)
    processes.append(walled.start_worker("w", step_s=0.05, max_running=2))
    pool = ThreadPoolExecutor(48)

    def ask(name: str, max_tokens: int, **more: Any) -> int:
        tenant = walled.tenants[name]
        body = {
            "model": tenant.adapter,
            "messages": [{"role": "user", "content": words(name)}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **more,
        }
        headers = {"Authorization": f"Bearer {tenant.key}"}
        with httpx.Client(timeout=120) as client:
            try:
                answer = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
            except httpx.HTTPError:
                return 0  # the end of the test
        return answer.status_code

    for name in NAMES:
        assert ask(name, 5) == 200
        assert ask(name, 5, stream=True) == 200
        assert ask(name, 5, model=f"{name}-lost") >= 400  # another test may have deleted it
    with httpx.Client() as client:
        page = client.get(f"{url}/console/sign-in").text
        token = re.findall(r'csrfmiddlewaretoken" value="([^"]+)"', page)[0]
        form = {"csrfmiddlewaretoken": token, "login": "owner@acme.example", "password": "wrong"}
        assert "do not match" in client.post(f"{url}/console/sign-in", data=form).text
    for name in NAMES:
        pool.submit(ask, name, 2000, stream=True)
    # Else the worker, which takes two, might run one tenant's alone.
    wait_for(lambda: len(running(walled.redis)) == 2, timeout_s=60, what="both at once")
    for name in NAMES * 23:
        pool.submit(ask, name, 2000, stream=True)

    def is_busy() -> bool:
        keys = [key.decode() for key in walled.redis.scan_iter("*", count=1000)]
        waiting = {tenant for key in keys if (tenant := tenant_in(key)) and key.startswith("q:")}
        return len(waiting) == 2

    wait_for(is_busy, timeout_s=60, what="the queue")
    yield walled, url
    for process in processes:
        process.end()
    pool.shutdown(wait=True)


def tenant_in(key: str) -> str | None:
    """The tenant that a key names."""
    for pattern in OF_A_TENANT:
        if found := re.fullmatch(pattern, key):
            return found["tenant"]
    return None


def matches(key: str, patterns: list[str]) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def records(client: Any, key: str) -> list[bytes]:
    """All that a key holds, record by record."""
    kind = client.type(key)
    if kind == b"string":
        return [client.get(key)]
    if kind == b"hash":
        return [b" ".join(field) for field in client.hgetall(key).items()]
    if kind == b"list":
        return list(client.lrange(key, 0, -1))
    if kind == b"set":
        return list(client.smembers(key))
    if kind == b"zset":
        return list(client.zrange(key, 0, -1))
    assert kind in (b"stream", b"none"), (key, kind)
    entries = client.xrange(key) if kind == b"stream" else []
    return [b" ".join(v for pair in fields.items() for v in pair) for _, fields in entries]


class Owners:
    """Whose each request is, by its own record."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getitem__(self, request_id: str) -> str:
        key = protocol.job_key(POOL, request_id)
        tenant, payload = self._client.hmget(key, "tenant", "m")
        if payload is not None:
            assert GenerateJob.decode(payload).tenant_id == tenant.decode()
        assert tenant is not None, f"{request_id} is nobody's"
        return str(tenant.decode())


def running(client: Any) -> set[bytes]:
    """The tenants that a worker computes something for."""
    jobs = (client.hmget(key, "tenant", "state") for key in client.scan_iter("job:*", count=1000))
    return {tenant for tenant, state in jobs if state == b"running"}


def results(client: Any) -> Iterator[tuple[str, str]]:
    """(tenant, text) of all events that gateways have not given up yet."""
    owners = Owners(client)
    for raw in client.scan_iter("out:*"):
        for _, fields in client.xrange(raw):
            for event in protocol.unpack_events(fields[protocol.PAYLOAD_FIELD]):
                yield owners[event.request_id], event.text


def tenants_of_record(key: str, record: bytes, owners: Owners) -> set[str]:
    """Whom a record of a shared key is about, by what it says itself."""
    if key.startswith("job:"):
        return {owners[key.rpartition(":")[2]]}
    _, _, payload = record.partition(protocol.PAYLOAD_FIELD + b" ")
    payload = payload or record
    if key.startswith("out:"):
        events, _ = json.JSONDecoder().raw_decode(payload.decode())
        return {owners[event["request_id"]] for event in events}
    said, _ = json.JSONDecoder().raw_decode(payload.decode())
    read = DoneRecord if key.startswith("done:") else GenerateJob
    made = read.from_dict(said)
    assert owners[made.request_id] == made.tenant_id
    return {made.tenant_id}


def test_each_key_and_record_is_of_one_tenant_or_of_the_platform(
    traffic: tuple[LiveStack, str],
) -> None:
    live, _ = traffic
    client: Any = live.redis
    ids = {live.tenants[name].id: name for name in NAMES}
    owners, seen = Owners(client), set()
    for raw in client.scan_iter("*", count=1000):
        key = raw.decode()
        tenant = tenant_in(key)
        for record in records(client, key):
            said = {name for name in NAMES if words(name).encode() in record}
            if tenant is not None:
                seen.add((key.split(":")[0], tenant))
                assert said <= {ids.get(tenant)}, key  # others may have left theirs
                if key.startswith("q:"):
                    assert owners[record.split()[0].decode()] == tenant
            elif matches(key, OF_RECORDS):
                about = tenants_of_record(key, record, owners)
                seen |= {(key.split(":")[0], one) for one in about}
                assert said <= {ids[one] for one in about}, key
            else:
                assert matches(key, OF_NOBODY), f"whose is {key}?"
                assert not said, key
                assert b"acme.example" not in raw + record
    for tenant in ids:
        assert {"q", "lim", "bud", "job", "in", "done"} <= {
            kind for kind, one in seen if one == tenant
        }


def test_no_result_of_two_tenants_shares_a_request(traffic: tuple[LiveStack, str]) -> None:
    """A result stream is a gateway's, for all its clients: each event names one request."""
    live, _ = traffic
    seen: set[str] = set()

    def look() -> bool:
        """Gateways give up what they have read, so one look may show one tenant's alone."""
        for owner, text in results(live.redis):
            for name in NAMES:
                if owner != live.tenants[name].id:
                    assert words(name) not in text
            seen.add(owner)
        return seen == {live.tenants[name].id for name in NAMES}

    wait_for(look, what="results of both tenants")


def test_nothing_of_one_is_readable_by_the_other(traffic: tuple[LiveStack, str]) -> None:
    live, url = traffic
    client: Any = live.redis
    owners = Owners(client)
    jobs = client.scan_iter(protocol.job_key(POOL, "*"), count=1000)
    request_ids = [key.decode().rpartition(":")[2] for key in jobs]
    acme, globex = (live.tenants[name] for name in NAMES)
    theirs = [one for one in request_ids if owners[one] == acme.id]
    assert len(theirs) >= 5
    accountant = live.start_accountant()
    mine = wait_for(
        lambda: a_recorded_request(live, acme.id), timeout_s=60, what="the first usage record"
    )
    stranger = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {globex.key}"})
    owner = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {acme.key}"})
    with stranger, owner:
        no_such = {path: stranger.get(path.format("req_" + "0" * 32)) for path in ADDRESSES}
        for request_id in theirs:
            for path in ADDRESSES:
                answer = stranger.get(path.format(request_id))
                assert (answer.status_code, answer.content) == (404, no_such[path].content)
        for path in ("/api/v1/requests", "/api/v1/usage", "/v1/models"):
            text = stranger.get(path).text
            assert "acme" not in text
            assert not any(request_id in text for request_id in theirs)
        for model in (acme.adapter, f"{acme.adapter}@1"):
            body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
            assert stranger.post("/v1/chat/completions", json=body).status_code == 404
        # The same questions have answers, for their owner.
        for path in ADDRESSES:
            assert owner.get(path.format(mine)).status_code == 200
    accountant.end()


#: Where a request can be read about.
ADDRESSES = ("/api/v1/requests/{}", "/api/v1/requests/{}/usage")


def a_recorded_request(live: LiveStack, tenant_id: str) -> str | None:
    """An ended request of the tenant that the accountant has written down."""
    with psycopg.connect(live.database_url) as connection:
        query = "select request_id from usage_usagerecord where tenant_id = %s limit 1"
        row = connection.execute(query, (tenant_id,)).fetchone()
    return str(row[0]) if row else None
