"""/ops/v1: operators alone, across tenants."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import Client

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.adapters.models import BaseModel
from controlplane.aliases.resolution import models_list
from controlplane.errors import PermissionDenied
from controlplane.events.audit.models import AuditEvent
from controlplane.gateway import models as served_models
from controlplane.queue.models import DeadLetter
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import auth, idempotency
from controlplane.tenants.models import OperatorIdempotencyRecord, Tenant, User
from tests.controlplane.conftest import (
    Party,
    as_key,
    as_user,
    assert_error,
    make_operator,
)
from tests.controlplane.management.test_openapi import DOCUMENT, METHODS

OPERATIONS = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in METHODS
    if method in item and path.startswith("/ops/v1/")
]
WORKER = "ops-worker"


def address(path: str, **names: str) -> str:
    """The address of an operation, with these names in it and some name for each other."""
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", value)
    path = re.sub(r"\{(letter|run)_id\}", "00000000-0000-0000-0000-000000000000", path)
    return path.replace("{number}", "1").replace("{", "").replace("}", "")


@pytest.fixture
def operator(db: None) -> User:
    return make_operator("ops@lorikeet.example")


PRECISION = {"weights": "fp8", "kv": "bfloat16", "adapters": "fp8"}


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
        precision=PRECISION,
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


def trail() -> list[tuple[str, str, str]]:
    """The platform's own events: what, to what, by whom."""
    with all_tenants(reason="test"):
        events = AuditEvent.objects.filter(tenant=None).order_by("seq")
        return list(events.values_list("action", "resource_id", "actor_name"))


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{m} {p}" for m, p in OPERATIONS])
def test_no_tenant_gets_in(acme: Party, method: str, path: str) -> None:
    url = address(path)
    assert_error(getattr(as_user(acme.owner), method)(url), 403)
    refused = assert_error(getattr(as_key(acme), method)(url), 401)
    assert refused["code"] == "wrong_key_kind"
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
    rows = {row["id"]: row for row in client.get("/ops/v1/workers").json()["data"]}
    assert rows[WORKER]["precision"] == PRECISION
    assert client.post(f"/ops/v1/workers/{WORKER}/drain").status_code == 202
    ((_, fields),) = pool.xrange(protocol.control_key(settings.POOL, WORKER))
    order = protocol.ControlMessage.decode(fields[protocol.PAYLOAD_FIELD])
    assert order.action == protocol.Control.DRAIN
    assert trail()[-1] == ("worker.drained", WORKER, operator.email)
    assert_error(client.post("/ops/v1/workers/nobody/drain"), 404)


def test_queues_and_quarantine(operator: User, pool: Any) -> None:
    client = as_user(operator)
    assert client.get("/ops/v1/queues").status_code == 200
    pool.hset(fair_queue.quarantine_key(settings.POOL), "d" * 64, 1_700_000_000)
    assert [row["digest"] for row in client.get("/ops/v1/quarantine").json()["data"]] == ["d" * 64]
    url = f"/ops/v1/quarantine/{'d' * 64}"
    assert client.delete(url).status_code == 204
    assert trail()[-1] == ("quarantine.released", "d" * 64, operator.email)
    length = len(trail())
    assert_error(client.delete(url), 404)
    assert len(trail()) == length


def test_dead_letters_show_no_prompt(operator: User, acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        DeadLetter.objects.create(
            request_id="req_1", model="m", reason="given up", job={"prompt": "a secret"}
        )
    answer = as_user(operator).get("/ops/v1/dead-letters")
    assert answer.json()["data"][0]["tenant"] == "acme"
    assert b"a secret" not in answer.content


def test_a_write_with_a_key_is_made_once(operator: User, pool: Any) -> None:
    client, body = as_user(operator), {"slug": "initech", "name": "Initech"}
    key = {"HTTP_IDEMPOTENCY_KEY": "one"}
    made = client.post("/ops/v1/tenants", body, format="json", **key)
    again = client.post("/ops/v1/tenants", body, format="json", **key)
    assert (made.status_code, again.status_code) == (201, 201)
    assert again.content == made.content
    assert again.headers["Idempotent-Replayed"] == "true"
    assert_error(client.post("/ops/v1/tenants", body, format="json"), 409, "slug")
    other = body | {"slug": "other"}
    reused = assert_error(
        client.post("/ops/v1/tenants", other, format="json", **key), 400, "Idempotency-Key"
    )
    assert reused["code"] == "idempotency_key_reused"
    for _ in range(2):
        client.post(f"/ops/v1/workers/{WORKER}/drain", **key)
    assert pool.xlen(protocol.control_key(settings.POOL, WORKER)) == 1
    assert [action for action, *_ in trail()].count("worker.drained") == 1


def test_another_operators_key_is_another_key(operator: User) -> None:
    colleague = make_operator("colleague@lorikeet.example")
    for user, slug in ((operator, "one"), (colleague, "two")):
        body = {"slug": slug, "name": slug}
        answer = as_user(user).post(
            "/ops/v1/tenants", body, format="json", HTTP_IDEMPOTENCY_KEY="same"
        )
        assert answer.json()["slug"] == slug


def test_an_answer_that_is_an_error_is_not_kept(operator: User, acme: Party) -> None:
    client, body = as_user(operator), {"slug": "acme", "name": "Acme"}
    key = {"HTTP_IDEMPOTENCY_KEY": "one"}
    assert_error(client.post("/ops/v1/tenants", body, format="json", **key), 409, "slug")
    assert OperatorIdempotencyRecord.objects.count() == 0


@pytest.mark.parametrize("name", ["tenants", "base-models", "workers", "queues", "quarantine"])
def test_every_list_is_paged(
    name: str, operator: User, acme: Party, globex: Party, base_model: BaseModel, pool: Any
) -> None:
    key = fair_queue.quarantine_key(settings.POOL)
    for number in range(3):
        pool.hset(key, f"{number}" * 64, 1_700_000_000 + number)
    client, url = as_user(operator), f"/ops/v1/{name}"
    whole = client.get(url).json()
    assert (whole["object"], whole["has_more"]) == ("list", False)
    seen, query = [], "?limit=1"
    while True:
        page = client.get(url + query).json()
        assert len(page["data"]) <= 1
        seen += page["data"]
        if not page["has_more"]:
            break
        query = f"?limit=1&after={page['last_id']}"
    assert len(seen) == len(whole["data"])
    if name == "quarantine":
        assert [row["digest"][0] for row in seen] == ["2", "1", "0"]
    if name != "queues":
        assert seen
    assert_error(client.get(f"{url}?after=nonsense"), 400, "after")
    assert_error(client.get(f"{url}?limit=0"), 400, "limit")


def test_a_dead_letter_runs_once_though_its_answer_is_lost(
    operator: User, acme: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between the queue's word and the database's; the operator tries again."""
    settings.POOL = "letters"
    job = protocol.GenerateJob(
        request_id="req_1",
        tenant_id=str(acme.tenant.id),
        api_key_id="",
        gateway_id="",
        model="tiny",
        base_model="tiny",
        text="Hello",
    )
    with tenant_scope(acme.tenant.id):
        letter = DeadLetter.objects.create(
            request_id="req_1", model="tiny", reason="given up", job=job.to_dict()
        )
    client, url = as_user(operator), f"/ops/v1/dead-letters/{letter.pk}/requeue"
    client.raise_request_exception = False

    def die(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(idempotency.Attempt, "end", die)
        assert client.post(url, HTTP_IDEMPOTENCY_KEY="one").status_code == 500
    for _ in range(2):
        assert client.post(url, HTTP_IDEMPOTENCY_KEY="one").status_code == 200
    assert_error(client.post(url), 409)
    queue = redis.Redis.from_url(settings.REDIS_URL, protocol=2)
    try:
        assert len(queue.keys(protocol.job_key("letters", "*"))) == 1
        sums = f"{fair_queue.queue_key('letters', 'tiny')}:sums"
        assert queue.hget(sums, "n") == b"1"
    finally:
        queue.delete(*queue.keys("*letters*"))
        queue.close()


def test_tenants_see_which_precision_answers(
    base_model: BaseModel, acme: Party, pool: Any, settings: Any
) -> None:
    def told() -> list[Any]:
        with tenant_scope(acme.tenant.id):
            found = models_list()
        return [
            served_models.ServedModelSerializer(model, context=served_models._context()).data[
                "precision"
            ]
            for model in found
        ]

    assert told() == [[PRECISION]]
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert told() == [[]]
