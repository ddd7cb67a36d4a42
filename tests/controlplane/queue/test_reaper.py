"""What becomes of a dead worker's requests."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone

from contract.messages import protocol
from contract.messages.protocol import ErrorCode, GenerateJob, TokenEvent
from contract.queue import fair_queue, scripts
from controlplane.errors import Conflict
from controlplane.queue import dead_letters
from controlplane.queue.dead_letters import (
    dead_letter_prompts_forget,
    dead_letter_requeue,
    dead_letters_collect,
    quarantine_release,
    quarantine_sync,
    quarantined,
)
from controlplane.queue.models import DeadLetter
from controlplane.queue.reaper import REAPER, Reaper
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits.admit import Refusal
from demo.stack import EmbeddedStack
from tests.controlplane.conftest import Party
from tests.queue_rig import QueueRig


@dataclasses.dataclass
class Ward:
    rig: QueueRig
    reaper: Reaper

    def reap(self) -> None:
        """A turn, some seconds after the last."""
        self._let_pass("looked", 2.0)
        self.reaper.turn()

    def _let_pass(self, field: str, seconds: float) -> None:
        watch = f"reap:{{{self.rig.pool}}}"
        if self.rig.client.exists(watch):
            self.rig.client.hincrbyfloat(watch, field, -seconds)

    def die(self, worker: str = "w") -> None:
        self.rig.beat(worker, silent_s=protocol.HEARTBEAT_TIMEOUT_S + 1)

    def forget_service(self) -> None:
        """Let it be long ago that a worker was last heard of."""
        served = fair_queue.served_key(self.rig.pool)
        for queue in self.rig.client.zrange(served, 0, -1):
            self.rig.client.zadd(served, {queue: 0})

    def wait_out(self) -> None:
        """Let the reapers have watched for as long as they wait for workers."""
        self._let_pass("since", protocol.WORKER_GRACE_S)

    def lose_redis(self, seconds: float) -> None:
        """Let Redis have been away until now: nobody was heard, and nobody watched."""
        self._let_pass("looked", seconds)
        workers = protocol.workers_key(self.rig.pool)
        for name in self.rig.client.zrange(workers, 0, -1):
            self.rig.client.zincrby(workers, -seconds, name)
        served = fair_queue.served_key(self.rig.pool)
        for queue in self.rig.client.zrange(served, 0, -1):
            self.rig.client.zincrby(served, -seconds, queue)

    def events(self) -> list[TokenEvent]:
        entries = self.rig.client.xrange(protocol.out_key(f"g-{self.rig.pool}"))
        return [event for _, fields in entries for event in protocol.unpack_events(fields[b"m"])]


@pytest.fixture
def ward(stack: EmbeddedStack) -> Iterator[Ward]:
    rig = QueueRig(stack.env["REDIS_URL"])
    made = Ward(rig, Reaper(rig.url, rig.pool))
    made.reap()
    made._let_pass("since", protocol.HEARTBEAT_TIMEOUT_S)
    yield made
    made.reaper.close()
    rig.close()


def test_what_told_nothing_goes_back_to_the_front(ward: Ward) -> None:
    rig = ward.rig
    ids = [rig.accept() for _ in range(3)]
    first, second = rig.pull("dead", 2)
    ward.die("dead")
    ward.reap()
    assert [taken.job.request_id for taken in rig.pull("w", 4)] != ids[2:]
    assert rig.state(ids[0])[b"attempt"] == b"2"
    assert not rig.publish(first, worker="dead"), "a zombie's lease was taken for current"
    assert rig.done() == []
    assert rig.client.xlen(protocol.inbox_key(rig.pool, "dead")) == 0
    assert second.lease == 1


def test_a_lost_worker_is_one_line_and_one_for_each_of_its_requests(
    ward: Ward, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ward.rig
    request_id = rig.accept()
    rig.pull("dead")
    ward.die("dead")
    for _ in range(3):
        ward.reap()
    lines = [record.__dict__ for record in caplog.records]
    [lost] = [line for line in lines if line["message"] == "worker lost"]
    [taken] = [line for line in lines if "was taken over" in line["message"]]
    assert lost["worker_id"] == taken["worker_id"] == "dead"
    assert (taken["request_id"], taken["levelname"]) == (request_id, "WARNING")


@pytest.mark.parametrize("has_pulled", [True, False])
def test_nothing_stays_of_a_worker_that_never_comes_back(ward: Ward, has_pulled: bool) -> None:
    rig = ward.rig
    keys = set(rig.client.scan_iter(f"*{rig.pool}*"))
    ward.die("pod-1")
    rig.client.xadd(protocol.control_key(rig.pool, "pod-1"), {"m": b"{}"})
    if has_pulled:
        rig.accept()
        rig.pull("pod-1")
    ward.reap()
    assert rig.client.zscore(protocol.workers_key(rig.pool), "pod-1"), "it may be restarting"
    rig.client.delete(protocol.worker_key(rig.pool, "pod-1"))  # expired
    ward.reap()
    if has_pulled:
        rig.publish(*rig.pull("w"))
        rig.beat("w")
    assert rig.client.zscore(protocol.workers_key(rig.pool), "pod-1") is None
    left = {key for key in rig.client.scan_iter(f"*{rig.pool}*") if b"pod-1" in key}
    assert left - keys == set()
    assert not rig.client.sismember(fair_queue.inboxes_key(rig.pool), "pod-1")


def test_a_living_worker_is_left_alone(ward: Ward) -> None:
    ward.rig.beat("w")
    ward.rig.accept()
    (taken,) = ward.rig.pull()
    ward.reap()
    assert ward.rig.publish(taken)


def test_a_redis_that_was_away_makes_no_worker_dead(ward: Ward) -> None:
    rig = ward.rig
    rig.beat("w")
    waiting = [rig.accept() for _ in range(2)]
    (taken,) = rig.pull()
    ward.wait_out()
    ward.reap()
    ward.lose_redis(2 * protocol.WORKER_GRACE_S)
    ward.reap()
    assert rig.done() == []
    rig.beat("w")
    ward._let_pass("since", protocol.HEARTBEAT_TIMEOUT_S)
    ward.reap()
    assert rig.publish(taken), "what ran went on under its lease"
    assert rig.state(waiting[1])[b"state"] == b"queued"
    (second,) = rig.pull()
    ward.die()
    ward.reap()
    assert not rig.publish(second), "one that stayed silent is dead all the same"


def test_what_was_half_told_ends_once_and_is_billed_so_far(ward: Ward) -> None:
    rig = ward.rig
    rig.accept()
    (taken,) = rig.pull()
    rig.publish(taken, output=7, ends=False)
    ward.die()
    for _ in range(3):
        ward.reap()
    (record,) = rig.done()
    assert (record.completion_tokens, record.error_code) == (7, ErrorCode.WORKER_LOST)
    assert [event.lease for event in ward.events()] == [1, 2]
    assert ward.events()[-1].error_code == ErrorCode.WORKER_LOST
    assert not rig.publish(taken, seq=1)
    assert len(rig.done()) == 1


def test_a_cancelled_one_is_not_run_again(ward: Ward) -> None:
    rig = ward.rig
    request_id = rig.accept()
    rig.pull()
    rig.client.hset(protocol.job_key(rig.pool, request_id), "cancel", 1)
    ward.die()
    ward.reap()
    assert [record.finish_reason for record in rig.done()] == ["cancelled"]
    assert rig.pull() == []


def test_a_reaper_that_died_half_way_is_followed_by_the_next(ward: Ward) -> None:
    rig = ward.rig
    rig.accept()
    (taken,) = rig.pull()
    rig.publish(taken, output=7, ends=False)
    ward.die()
    original, ward.reaper._end = ward.reaper._end, lambda *_: None  # type: ignore[method-assign]
    ward.reap()
    assert rig.done() == []
    ward.reaper._end = original  # type: ignore[method-assign]
    ward.reap()
    assert len(rig.done()) == 1


def crash(ward: Ward, *, alone: str | None = None) -> None:
    for taken in ward.rig.pull("w", 4):
        if taken.job.request_id == alone:
            ward.rig.client.hset(protocol.job_key(ward.rig.pool, alone), "alone", 1)
    ward.die()
    ward.reap()


def test_only_the_culprit_is_given_up_and_its_adapter_not_served(ward: Ward) -> None:
    rig = ward.rig
    deadly = rig.accept("t", digest="bad")
    bystander = rig.accept("u", digest="good")
    crash(ward)
    for _ in range(3):
        crash(ward, alone=deadly)
    (record,) = rig.done()
    assert (record.request_id, record.error_code) == (deadly, ErrorCode.GIVEN_UP)
    (entry,) = rig.client.xrange(protocol.dead_letter_key(rig.pool))
    assert GenerateJob.decode(entry[1][b"m"]).request_id == deadly
    verdict = rig.admit(rig.job("t", digest="bad"))
    assert isinstance(verdict, Refusal)
    assert verdict.reason == "quarantined"
    rig.accept("u", digest="good")
    assert bystander in [taken.job.request_id for taken in rig.pull("w2", 4)]


@pytest.mark.parametrize("is_pulled", [True, False], ids=["pulled", "waiting"])
def test_what_is_no_job_is_a_dead_letter_and_harms_no_other(ward: Ward, is_pulled: bool) -> None:
    rig = ward.rig
    junk, other = rig.accept(), rig.accept()
    rig.client.hset(protocol.job_key(rig.pool, junk), "m", b"[" * 100_000)
    if is_pulled:
        keys = [rig.queue, protocol.inbox_key(rig.pool, "w"), "-"]
        args = [rig.pool, "w", "boot", 4, protocol.INBOX_GROUP]
        assert len(rig.client.eval(scripts.load("pull"), 3, *keys, *args)) == 2
        ward.die()
        ward.reap()
        assert rig.state(other)[b"state"] == b"queued"
    else:
        ward.reap()
        ward.forget_service()
        ward.wait_out()
        ward.reap()
        assert [record.request_id for record in rig.done()] == [other]
    ((_, letter),) = rig.client.xrange(protocol.dead_letter_key(rig.pool))
    assert letter[b"m"] == b"[" * 100_000
    worker = "w" if is_pulled else REAPER
    assert rig.client.xlen(protocol.inbox_key(rig.pool, worker)) == 0


def test_what_no_worker_will_ever_serve_ends(ward: Ward) -> None:
    for _ in range(10):
        ward.rig.accept()
    ward.reap()
    ward.forget_service()
    assert ward.rig.done() == [], "a reaper that has only just begun knows of no worker yet"
    ward.wait_out()
    ward.reap()
    assert {record.error_code for record in ward.rig.done()} == {ErrorCode.WORKER_LOST}
    assert len(ward.rig.done()) == 10


def test_what_waits_outlasts_a_worker_that_leaves_on_purpose(ward: Ward) -> None:
    rig = ward.rig
    rig.beat("w")
    rig.accept()
    ward.reap()
    ward.wait_out()
    ward.reap()
    rig.client.zrem(protocol.workers_key(rig.pool), "w")
    rig.client.delete(protocol.worker_key(rig.pool, "w"))
    ward.reap()
    assert rig.done() == []
    assert len(rig.pull("w")) == 1, "the worker that came back"


@pytest.mark.django_db
def test_a_dead_letter_is_a_row_and_can_be_put_back(
    ward: Ward, acme: Party, settings: object
) -> None:
    rig = ward.rig
    settings.POOL = rig.pool  # type: ignore[attr-defined]
    deadly = rig.accept(str(acme.tenant.id), digest="bad")
    for alone in (None, deadly):
        crash(ward, alone=alone)
    for _ in range(2):
        dead_letters_collect(rig.client, rig.pool)
    assert list(quarantined()) == ["bad"]
    assert rig.client.xlen(protocol.dead_letter_key(rig.pool)) == 0, "its prompt is in Redis still"
    with tenant_scope(acme.tenant.id):
        letter = DeadLetter.objects.get()
        assert letter.request_id == deadly
        with pytest.raises(Conflict):  # while its adapter is quarantined
            dead_letter_requeue(letter)
        assert quarantine_release("bad")
        again = dead_letter_requeue(letter)
        letter.refresh_from_db()
        assert letter.job is None, "its prompt is of no more use"
        with pytest.raises(Conflict, match="already"):
            dead_letter_requeue(letter)
    (taken,) = rig.pull()
    assert (taken.job.request_id, taken.job.is_batch) == (again, True)


@pytest.mark.django_db
def test_a_letter_that_somebody_died_at_can_be_put_back(
    ward: Ward, acme: Party, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, settings.POOL = ward.rig, ward.rig.pool
    job = rig.job(str(acme.tenant.id))
    with tenant_scope(acme.tenant.id):
        letter = DeadLetter.objects.create(
            request_id=job.request_id, model="m", reason="given up", job=job.to_dict()
        )
        with monkeypatch.context() as patch:
            patch.setattr(dead_letters, "redis_client", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                dead_letter_requeue(letter)
        letter.refresh_from_db()
        assert letter.requeued_at is not None
        ids = {dead_letter_requeue(letter)}
        letter.job = job.to_dict()
        with pytest.raises(Conflict, match="already"):
            dead_letter_requeue(letter)
    assert {taken.job.request_id for taken in rig.pull()} == ids


@pytest.mark.django_db
def test_a_dead_letters_prompt_is_dropped_in_time(acme: Party, settings: Any) -> None:
    settings.DEAD_LETTER_DAYS = 7
    with tenant_scope(acme.tenant.id):
        letter = DeadLetter.objects.create(
            request_id="req_1", model="m", reason="given up", job={"text": "a secret"}
        )
    soon, late = (timezone.now() + dt.timedelta(days=days) for days in (6.9, 7.1))
    assert dead_letter_prompts_forget(now=soon) == 0
    assert [dead_letter_prompts_forget(now=late) for _ in range(2)] == [1, 0]
    with tenant_scope(acme.tenant.id):
        letter.refresh_from_db()
        assert (letter.job, letter.requeued_at) == (None, None)
        with pytest.raises(Conflict, match="not kept"):
            dead_letter_requeue(letter)


@pytest.mark.django_db
def test_quarantine_survives_a_redis_that_forgets(
    ward: Ward, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig, settings.POOL = ward.rig, ward.rig.pool
    deadly = rig.accept(digest="bad")
    for alone in (None, deadly):
        crash(ward, alone=alone)
    since = quarantined()
    for _ in range(2):
        quarantine_sync(rig.client, rig.pool)
    [line] = [r for r in caplog.records if r.getMessage() == "an adapter was quarantined"]
    assert line.digest == "bad"  # type: ignore[attr-defined]
    rig.client.delete(fair_queue.quarantine_key(rig.pool))
    assert quarantined() == {}
    quarantine_sync(rig.client, rig.pool)
    assert quarantined() == since
    assert isinstance(rig.admit(rig.job(digest="bad")), Refusal)
    assert quarantine_release("bad")
    quarantine_sync(rig.client, rig.pool)
    assert quarantined() == {}
    assert not quarantine_release("bad")
    rig.accept(digest="bad")


@pytest.mark.django_db(transaction=True)
def test_a_letter_that_fits_no_row_harms_no_other(ward: Ward, acme: Party) -> None:
    rig = ward.rig
    tenant_id = str(acme.tenant.id)
    jobs = [
        rig.job(tenant_id),
        dataclasses.replace(rig.job(tenant_id), text="nul \0"),
        rig.job(str(uuid.uuid4())),  # its tenant is gone
        rig.job(tenant_id),
    ]
    for job in jobs:
        fields: Any = {"m": job.encode(), "source": "w", "reason": "given up"}
        rig.client.xadd(protocol.dead_letter_key(rig.pool), fields)
    assert [dead_letters_collect(rig.client, rig.pool) for _ in range(2)] == [4, 0]
    with all_tenants(reason="to see everything"):
        found = dict(DeadLetter.objects.values_list("request_id", "job"))
    assert {name: job is not None for name, job in found.items()} == {
        jobs[0].request_id: True,
        jobs[1].request_id: False,
        jobs[3].request_id: True,
    }
