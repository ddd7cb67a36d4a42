"""/ops/v1: operators alone, across tenants."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import Client

from controlplane.adapters.models import BaseModel
from controlplane.delivery.models import DeadLetter
from controlplane.errors import PermissionDenied
from controlplane.scoping import tenant_scope
from controlplane.tenants import auth, services
from controlplane.tenants.models import Tenant, User
from tests.controlplane.conftest import PASSWORD, Party, as_key, as_user, assert_error
from tests.controlplane.test_openapi import COMMITTED, METHODS
from worker import fair_queue, protocol

OPERATIONS = [
    (method, path)
    for path, item in COMMITTED["paths"].items()
    for method in METHODS
    if method in item and path.startswith("/ops/v1/")
]
WORKER = "ops-worker"


@pytest.fixture
def operator(db: None) -> User:
    return services.user_create(email="ops@lorikeet.example", password=PASSWORD, is_operator=True)


@pytest.fixture
def pool() -> Any:
    client = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    beat = protocol.Heartbeat(
        worker_id=WORKER,
        boot_id="b",
        pool=settings.POOL,
        base_model="tiny",
        base_revision="0" * 64,
        device="cpu",
    )
    seconds, _ = client.time()
    client.hset(protocol.worker_key(settings.POOL, WORKER), "m", beat.encode())
    client.zadd(protocol.workers_key(settings.POOL), {WORKER: seconds})
    yield client
    client.delete(
        protocol.worker_key(settings.POOL, WORKER),
        protocol.control_key(settings.POOL, WORKER),
        fair_queue.quarantine_key(settings.POOL),
    )
    client.zrem(protocol.workers_key(settings.POOL), WORKER)
    client.close()


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{m} {p}" for m, p in OPERATIONS])
def test_no_tenant_gets_in(acme: Party, method: str, path: str) -> None:
    url = path.replace("{letter_id}", str(acme.tenant.id)).replace("{", "").replace("}", "")
    assert_error(getattr(as_user(acme.owner), method)(url), 403)
    assert_error(getattr(as_key(acme), method)(url), 401)
    assert_error(getattr(Client(), method)(url), 401)


def test_write_needs_the_csrf_token(operator: User) -> None:
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(operator)
    answer = browser.post("/ops/v1/tenants", {"slug": "x", "name": "X"}, "application/json")
    assert_error(answer, 403)
    assert not Tenant.objects.exists()


def test_a_tenants_life(operator: User, acme: Party) -> None:
    client = as_user(operator)
    made = client.post("/ops/v1/tenants", {"slug": "initech", "name": "Initech"}, format="json")
    assert made.status_code == 201
    slugs = [row["slug"] for row in client.get("/ops/v1/tenants").json()["data"]]
    assert slugs == ["initech", "acme"]
    changed = client.patch("/ops/v1/tenants/acme", {"status": "suspended"}, format="json").json()
    assert changed["status"] == "suspended"
    with pytest.raises(PermissionDenied):
        auth.authenticate(acme.header)
    assert_error(client.get("/ops/v1/tenants/nobody"), 404)


def test_only_the_operator_limits_a_tenant_as_a_whole(operator: User, acme: Party) -> None:
    body = {"requests_per_minute": 10}
    theirs = as_user(acme.owner)
    assert_error(theirs.put("/api/v1/limits", body, format="json"), 403)
    row = as_user(operator).put("/ops/v1/tenants/acme/limits", body, format="json").json()
    assert theirs.get("/api/v1/limits").json()["data"] == [row]
    assert_error(theirs.delete(f"/api/v1/limits/{row['id']}"), 403)


def test_base_model_is_switched_off(operator: User, base_model: BaseModel, acme: Party) -> None:
    client = as_user(operator)
    url = "/ops/v1/base-models/tiny"
    assert client.patch(url, {"is_active": False}, format="json").json()["is_active"] is False
    assert as_key(acme).get("/api/v1/base-models").json()["data"] == []
    assert len(client.get("/ops/v1/base-models").json()["data"]) == 1


def test_worker_is_told_to_drain(operator: User, pool: Any) -> None:
    client = as_user(operator)
    assert WORKER in [row["id"] for row in client.get("/ops/v1/workers").json()]
    assert client.post(f"/ops/v1/workers/{WORKER}/drain").status_code == 202
    ((_, fields),) = pool.xrange(protocol.control_key(settings.POOL, WORKER))
    order = protocol.ControlMessage.decode(fields[protocol.PAYLOAD_FIELD])
    assert order.action == protocol.Control.DRAIN
    assert_error(client.post("/ops/v1/workers/nobody/drain"), 404)


def test_queues_and_quarantine(operator: User, pool: Any) -> None:
    client = as_user(operator)
    assert client.get("/ops/v1/queues").status_code == 200
    pool.hset(fair_queue.quarantine_key(settings.POOL), "d" * 64, 1_700_000_000)
    assert [row["digest"] for row in client.get("/ops/v1/quarantine").json()] == ["d" * 64]
    url = f"/ops/v1/quarantine/{'d' * 64}"
    assert client.delete(url).status_code == 204
    assert_error(client.delete(url), 404)


def test_dead_letters_show_no_prompt(operator: User, acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        DeadLetter.objects.create(
            request_id="req_1", model="m", reason="given up", job={"prompt": "a secret"}
        )
    answer = as_user(operator).get("/ops/v1/dead-letters")
    assert answer.json()["data"][0]["tenant"] == "acme"
    assert b"a secret" not in answer.content
