"""What holds of a batch is changed behind its runner's back while its lines are under way."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from contract.messages.protocol import done_key, job_key
from controlplane.files.batches.runner import LOOK_S
from controlplane.queue.batch_reply_stream import line_request_id
from tests.controlplane.files.batches.conftest import Batches
from tests.controlplane.files.batches.test_batch_crashes import lapse, nothing_is_left, records
from tests.controlplane.files.batches.test_takeover import check, create, fence, under_way
from tests.live import LiveStack, Process, wait_for

NUM_LINES = 10
NUM_TOKENS = 200


@pytest.fixture
def worker(pool: LiveStack) -> Iterator[Process]:
    process = pool.start_worker("changed-worker", step_s=0.03, max_running=16)
    pool.redis.delete(done_key(pool.pool))
    yield process
    for each in (*pool.named("changer-"), process):
        each.end()


def test_a_runner_that_finds_its_own_lease_over(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """It was paused and nobody else was there: it meets itself."""
    batch = create(batches, NUM_LINES, NUM_TOKENS)
    runner = pool.start_batch_runner("changer-itself")
    wait_for(lambda: len(under_way(pool, batch)) == NUM_LINES, timeout_s=60, what="its lines")
    before = fence(pool, batch)
    for _ in range(5):
        lapse(batches, batch)
        time.sleep(LOOK_S / 2)
    check(batches, pool, batch, NUM_LINES)
    assert fence(pool, batch) == before + 1  # its end
    assert runner.stop() == 0, runner.log.read_text()


def test_a_key_that_may_not_name_the_model_any_more(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """What was answered and billed by then is told."""
    batch = create(batches, NUM_LINES, NUM_TOKENS)
    runner = pool.start_batch_runner("changer-first")
    wait_for(lambda: len(under_way(pool, batch)) == NUM_LINES, timeout_s=60, what="its lines")
    runner.kill()
    wait_for(lambda: len(records(pool)) == NUM_LINES, timeout_s=60, what="their ends")
    try:
        set_models(batches, batch, '["another"]')
        lapse(batches, batch)
        last = pool.start_batch_runner("changer-last")
        check(batches, pool, batch, NUM_LINES)
    finally:
        set_models(batches, batch, "[]")
    assert last.stop() == 0, last.log.read_text()


def set_models(batches: Batches, batch: Any, allowed: str) -> None:
    """What the batch's key may name, as JSON."""
    with batches.site.database() as database:
        database.execute(
            "update tenants_apikey k set allowed_models = %s::jsonb from batches_batch b"
            " where b.id = %s and b.api_key_id = k.id",
            (allowed, batch.id.removeprefix("batch_")),
        )


def test_a_line_that_is_being_sent_when_its_batch_is_cancelled_is_not_begun(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """It reaches Redis after the batch has ended: the database took its time."""
    settings = f"""
import uuid
from controlplane.usage.limits import services
from controlplane.tenancy.scoping import tenant_scope
with tenant_scope(uuid.UUID("{pool.tenants["acme"].id}")):
    services."""
    batches.site.run_python(f"{settings}budget_set(period='month', hard_limit=10**12)")
    try:
        with batches.site.database() as database:
            database.autocommit = False
            database.execute("lock table usage_usageday in access exclusive mode")
            batch = create(batches, 1, 20)
            runner = pool.start_batch_runner("changer-slow")
            with batches.site.database() as other:
                blocked = "select 1 from pg_locks where not granted"
                wait_for(lambda: other.execute(blocked).fetchone(), timeout_s=60, what="its wait")
            batches.site.client().batches.cancel(batch.id)
            done = batches.ended(batch)
            assert (done.status, done.request_counts.completed) == ("cancelled", 0)
        budgets = f"bud:{{{pool.pool}}}:*"
        wait_for(lambda: pool.redis.keys(budgets), timeout_s=30, what="the answer of the database")
        time.sleep(0.5)  # it would be there at once
        assert runner.stop() == 0, runner.log.read_text()
    finally:
        batches.site.run_python(
            f"{settings}limit_remove(services.Budget.objects.get(hard_limit=10**12))"
        )
    sent = line_request_id(uuid.UUID(batch.id.removeprefix("batch_")), 1, 1)
    assert not pool.redis.exists(job_key(pool.pool, sent))
    assert not records(pool)
    assert nothing_is_left(pool, batch)
