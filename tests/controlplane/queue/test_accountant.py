"""The accountant with a real Redis and the tests' database."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.db import OperationalError

from contract.messages import protocol
from contract.messages.protocol import DoneRecord
from controlplane.queue import accountant as module
from controlplane.queue.accountant import Accountant
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_settle
from demo.stack import EmbeddedStack
from tests.controlplane.conftest import Party


def record(party: Party, request_id: str, **fields: Any) -> DoneRecord:
    return DoneRecord(
        **{
            "request_id": request_id,
            "tenant_id": str(party.tenant.id),
            "api_key_id": str(party.api_key.id),
            "worker_id": "w1",
            "lease": 1,
            "model": "invoices",
            "base_model": "tiny",
            "adapter_version_id": str(uuid.uuid4()),
            "digests": ("d",),
            "finish_reason": "stop",
            "error_code": None,
            "prompt_tokens": 11,
            "cached_tokens": 4,
            "completion_tokens": 7,
            "created_at": 1_700_000_000.0,
            "queue_ms": 1.0,
            "load_ms": 2.0,
            "first_token_ms": 3.0,
            "total_ms": 500.0,
            **fields,
        }
    )


@dataclasses.dataclass
class Rig:
    accountant: Accountant
    client: Any
    pool: str
    url: str

    def add(self, *records: DoneRecord | bytes) -> None:
        for item in records:
            payload = item if isinstance(item, bytes) else item.encode()
            self.client.xadd(protocol.done_key(self.pool), {"m": payload})

    def turn(self) -> None:
        """What `run` does until there is nothing left."""
        self.accountant._prepare()
        self.accountant._settle_pending()
        self.accountant._settle(self.accountant._read(">"))

    def left(self) -> int:
        return int(self.client.xlen(protocol.done_key(self.pool)))

    def pending(self) -> int:
        return int(self.client.xpending(protocol.done_key(self.pool), "acct")["pending"])

    def dead_letters(self) -> list[bytes]:
        entries = self.client.xrange(protocol.dead_letter_key(self.pool))
        return [fields[b"m"] for _, fields in entries]


@pytest.fixture
def rig(stack: EmbeddedStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(module, "BLOCK_MS", 10)
    url, pool = stack.env["REDIS_URL"], uuid.uuid4().hex[:8]
    client = redis.Redis.from_url(url, protocol=2)
    yield Rig(Accountant(url, pool, name="one"), client, pool, url)
    client.close()


def test_a_record_becomes_two_rows(rig: Rig, acme: Party) -> None:
    rig.add(record(acme, "req_1", stream=True))
    rig.turn()
    with tenant_scope(acme.tenant.id):
        usage = UsageRecord.objects.get(request_id="req_1")
        line = InferenceRequest.objects.get(request_id="req_1")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (11, 4, 7)
    assert usage.occurred_at.timestamp() == 1_700_000_000.5
    assert (line.worker_id, line.stream, line.first_token_ms) == ("w1", True, 3.0)
    assert (rig.left(), rig.pending()) == (0, 0)


def test_a_request_is_counted_once_however_often_it_is_reported(rig: Rig, acme: Party) -> None:
    rig.add(record(acme, "req_1"), record(acme, "req_1", completion_tokens=99))
    rig.turn()
    rig.add(record(acme, "req_1", completion_tokens=999))
    rig.turn()
    with tenant_scope(acme.tenant.id):
        assert [row.completion_tokens for row in UsageRecord.objects.all()] == [7]


def test_each_tenant_sees_its_own(rig: Rig, acme: Party, globex: Party) -> None:
    rig.add(record(acme, "req_1"), record(globex, "req_2"))
    rig.turn()
    for party, request_id in ((acme, "req_1"), (globex, "req_2")):
        with tenant_scope(party.tenant.id):
            assert [row.request_id for row in UsageRecord.objects.all()] == [request_id]


def test_what_was_read_and_not_settled_is_settled_by_the_next_run(rig: Rig, acme: Party) -> None:
    rig.add(record(acme, "req_1"), record(acme, "req_2"))
    rig.accountant._prepare()
    assert len(rig.accountant._read(">")) == 2  # and then it was killed
    Rig(Accountant(rig.url, rig.pool, name="one"), rig.client, rig.pool, rig.url).turn()
    with tenant_scope(acme.tenant.id):
        assert UsageRecord.objects.count() == 2
    assert (rig.left(), rig.pending()) == (0, 0)


def test_what_a_dead_accountant_holds_is_claimed(
    rig: Rig, acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.add(record(acme, "req_1"))
    rig.accountant._prepare()
    rig.accountant._read(">")
    other = Accountant(rig.url, rig.pool, name="two")
    assert other._claim() == []  # not idle for long enough
    monkeypatch.setattr(module, "CLAIM_IDLE_MS", 0)
    other._settle(other._claim())
    with tenant_scope(acme.tenant.id):
        assert UsageRecord.objects.count() == 1
    assert rig.pending() == 0


@pytest.mark.parametrize(
    "spoil",
    [
        {"tenant_id": "not a uuid"},
        {"tenant_id": str(uuid.uuid4())},
        {"prompt_tokens": -1},
        {"prompt_tokens": 2**40},
        {"model": "m" * 300},
        {"model": "nul \x00"},
        {"created_at": 1e300},
        {"completion_tokens": None},
        {"finish_reason": None},
    ],
    ids=str,
)
@pytest.mark.django_db(transaction=True)
def test_a_record_that_fits_no_row_is_parked_and_harms_no_other(
    rig: Rig, acme: Party, spoil: dict[str, Any]
) -> None:
    bad = record(acme, "req_bad", **spoil)
    rig.add(record(acme, "req_1"), bad, b"\xffno json", record(acme, "req_2"))
    rig.turn()
    with all_tenants(reason="to see everything"):
        found = set(UsageRecord.objects.values_list("request_id", flat=True))
    assert found == {"req_1", "req_2"}
    assert sorted(rig.dead_letters()) == sorted([bad.encode(), b"\xffno json"])
    assert (rig.left(), rig.pending()) == (0, 0)


@pytest.mark.django_db(transaction=True)
def test_it_waits_for_a_database_that_is_away(
    rig: Rig, acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([OperationalError("away"), OperationalError("still away")])
    settled = threading.Event()

    def flaky(records: list[DoneRecord]) -> None:
        if error := next(failures, None):
            raise error
        usage_settle(records)
        if records:
            settled.set()
            rig.accountant.stop.set()

    monkeypatch.setattr(module, "usage_settle", flaky)
    rig.add(record(acme, "req_1"))
    rig.accountant.run()
    assert settled.is_set()
    with tenant_scope(acme.tenant.id):
        assert UsageRecord.objects.count() == 1
    assert rig.dead_letters() == []


def test_it_makes_the_group_again_when_redis_forgot_it(rig: Rig, acme: Party) -> None:
    rig.turn()
    rig.client.delete(protocol.done_key(rig.pool))
    rig.add(record(acme, "req_1"))
    timer = threading.Timer(1.5, rig.accountant.stop.set)
    timer.start()
    rig.accountant.run()
    with tenant_scope(acme.tenant.id):
        assert UsageRecord.objects.count() == 1
