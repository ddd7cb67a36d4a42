"""What holds of a batch is changed behind its runner's back while its lines are under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.batches.runner import LOOK_S
from tests.controlplane.batches.conftest import Batches
from tests.controlplane.batches.test_batch_crashes import lapse, records
from tests.controlplane.batches.test_takeover import check, create, fence, under_way
from tests.live import LiveStack, Process, wait_for
from worker.protocol import done_key

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
    assert fence(pool, batch) == before
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
