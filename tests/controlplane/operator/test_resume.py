"""Operators end a drain: told once, by page and by API, and only to a worker that drains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.test import Client
from django.urls import reverse

from contract.messages import protocol
from controlplane.events.audit.models import AuditEvent
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenancy.scoping import all_tenants
from tests.controlplane.conftest import assert_error, make_operator
from tests.controlplane.operator.service_keys import as_service_key

pytestmark = pytest.mark.django_db

WORKER = "resumed"


@pytest.fixture(autouse=True)
def pool(settings: Any) -> Iterator[Any]:
    settings.POOL = "resumes"
    client = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    yield client
    for key in client.keys("*{resumes}*"):
        client.delete(key)
    client.close()


@pytest.fixture
def operator() -> Client:
    client = Client()
    client.force_login(make_operator())
    return client


def beat(pool: Any, *, draining: bool) -> None:
    heartbeat = protocol.Heartbeat(
        worker_id=WORKER,
        boot_id="b",
        pool="resumes",
        base_model="tiny",
        base_revision="0" * 64,
        device="cpu",
        draining=draining,
    )
    pool.hset(protocol.worker_key("resumes", WORKER), "m", heartbeat.encode())
    pool.zadd(protocol.workers_key("resumes"), {WORKER: pool.time()[0]})


def orders(pool: Any) -> list[str]:
    rows = pool.xrange(protocol.control_key("resumes", WORKER))
    return [
        protocol.ControlMessage.decode(fields[protocol.PAYLOAD_FIELD]).action for _, fields in rows
    ]


def trail() -> list[str]:
    with all_tenants(reason="test"):
        rows = AuditEvent.objects.filter(resource_type="worker").order_by("seq")
        return list(rows.values_list("action", flat=True))


def test_a_drain_is_ended_on_the_page_once(operator: Client, pool: Any) -> None:
    beat(pool, draining=True)
    page = operator.get(reverse("admin:workers")).content.decode()
    assert f'Resume<span class="ops-hidden"> {WORKER}' in page
    url = reverse("admin:resume", args=[WORKER])
    assert operator.get(url).status_code == 405
    told = [operator.post(url, follow=True).content.decode() for _ in range(2)]
    assert f"{WORKER} was told to resume." in told[0]
    assert f"{WORKER} is not draining." in told[1]
    assert (orders(pool), trail()) == (["resume"], ["worker.resumed"])


def test_orders_follow_each_other_before_a_heartbeat_shows_them(pool: Any) -> None:
    client, url = as_service_key(Scope.POOL_WRITE), f"/ops/v1/workers/{WORKER}/drain"
    beat(pool, draining=False)
    for _ in range(2):
        assert client.delete(url).status_code == 202  # it does not drain: nothing is sent
    assert orders(pool) == []
    for _ in range(2):
        assert client.post(url).status_code == 202
    for _ in range(2):
        assert client.delete(url).status_code == 202
    assert client.post(url).status_code == 202
    assert orders(pool) == ["drain", "resume", "drain"]
    assert trail() == ["worker.drained", "worker.resumed", "worker.drained"]
    assert_error(client.delete("/ops/v1/workers/nobody/drain"), 404)
    assert_error(as_service_key(Scope.POOL_READ).delete(url), 403)
