"""Runners and workers are killed and paused in the middle: each line is answered exactly once."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

import pytest

from contract.messages.protocol import GATEWAYS_KEY, PAYLOAD_FIELD, DoneRecord, done_key, out_key
from contract.queue.reply_streams import batch_stream_id, pending_lines_key
from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.live import LiveStack, Process, wait_for

#: More than a runner answers between two looks.
NUM_LINES = 1000


@pytest.fixture
def worker(pool: LiveStack) -> Any:
    process = pool.start_worker("crashes-worker", step_s=0.005, max_running=64)
    yield process
    process.end()


@pytest.fixture(autouse=True)
def _no_runner_is_left(pool: LiveStack, worker: Process) -> Any:
    """It would take up the next test's batch."""
    pool.redis.delete(done_key(pool.pool))
    yield
    for process in pool.named("runner-"):
        process.end()


def create(batches: Batches) -> Any:
    return batches.create(
        [chat_line(f"line-{i}", f"text {i}", max_tokens=20) for i in range(NUM_LINES)]
    )


def lapse(batches: Batches, batch: Any) -> None:
    """As if the lease's time had passed."""
    batches.set(batch, "lease_until = now()")


def num_done(batches: Batches, batch: Any) -> int:
    now = batches.site.client().batches.retrieve(batch.id)
    return int(now.request_counts.completed)


def wait_for_lines(batches: Batches, batch: Any, num: int) -> None:
    wait_for(lambda: num_done(batches, batch) >= num, timeout_s=60, what=f"{num} lines")


def gateways(pool: LiveStack) -> int:
    """Web servers and runners that say that they live."""
    seconds, _ = pool.redis.time()
    return int(pool.redis.zcount(GATEWAYS_KEY, seconds - 3, "+inf"))


def records(pool: LiveStack) -> list[DoneRecord]:
    """From which is billed what has ended since the test began: no accountant takes them here."""
    entries = pool.redis.xrange(done_key(pool.pool))
    return [DoneRecord.decode(fields[PAYLOAD_FIELD]) for _, fields in entries]


def check(batches: Batches, pool: LiveStack, batch: Any) -> None:
    """Every line is answered once, and billed once, under one id."""
    done = batches.ended(batch, timeout_s=120)
    assert done.status == "completed", done
    assert done.request_counts.model_dump() == {
        "total": NUM_LINES,
        "completed": NUM_LINES,
        "failed": 0,
    }
    assert done.error_file_id is None
    lines = batches.lines(done.output_file_id)
    assert len(lines) == NUM_LINES
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert answers == {f"line-{i}": f"text {i}" for i in range(NUM_LINES)}
    outputs = [
        file.id
        for file in batches.site.client().files.list(purpose="batch_output")
        if batch.id in file.filename
    ]
    assert outputs == [done.output_file_id]
    billed = Counter(record.request_id for record in records(pool))
    assert billed == Counter(line["response"]["request_id"] for line in lines)
    assert nothing_is_left(pool, batch)


def nothing_is_left(pool: LiveStack, batch: Any) -> bool:
    """In Redis, but for the fence."""
    batch_id = batch.id.removeprefix("batch_")
    pending_lines = pool.redis.hgetall(pending_lines_key(pool.pool, batch_id))
    return set(pending_lines) <= {b"fence"} and not pool.redis.exists(
        out_key(batch_stream_id(batch_id))
    )


def test_runners_that_are_killed_again_and_again(batches: Batches, pool: LiveStack) -> None:
    batch = create(batches)
    for num in (1, 400):
        runner = pool.start_batch_runner(f"runner-{num}")
        wait_for_lines(batches, batch, num)
        runner.kill()
        lapse(batches, batch)
    last = pool.start_batch_runner("runner-last")

    def is_finalizing() -> bool:
        status = batches.site.client().batches.retrieve(batch.id).status
        return status in ("finalizing", "completed")

    wait_for(is_finalizing, timeout_s=90, what="the last line")
    last.kill()
    lapse(batches, batch)
    end = pool.start_batch_runner("runner-end")
    check(batches, pool, batch)
    assert end.stop() == 0


@pytest.mark.long
def test_a_runner_that_was_paused_past_its_lease_and_wakes(
    batches: Batches, pool: LiveStack
) -> None:
    batch = create(batches)
    sleeper = pool.start_batch_runner("runner-sleeper")
    wait_for_lines(batches, batch, 100)
    sleeper.signal(signal.SIGSTOP)
    lapse(batches, batch)
    other = pool.start_batch_runner("runner-other")
    before = num_done(batches, batch)
    wait_for_lines(batches, batch, before + 100)
    sleeper.signal(signal.SIGCONT)
    check(batches, pool, batch)
    for process in (sleeper, other):
        assert process.stop() == 0, process.log.read_text()


@pytest.mark.long
def test_a_runner_that_is_stopped_hands_its_batch_over(batches: Batches, pool: LiveStack) -> None:
    batch = create(batches)
    holder = pool.start_batch_runner("runner-first")
    wait_for_lines(batches, batch, 100)
    other = pool.start_batch_runner("runner-second")
    wait_for(lambda: gateways(pool) >= 3, timeout_s=30, what="the second runner")
    started = time.monotonic()
    assert holder.stop() == 0, holder.log.read_text()
    before = num_done(batches, batch)
    wait_for_lines(batches, batch, min(NUM_LINES, before + 50))
    assert time.monotonic() - started < 20, "the other waited for the lease to pass"
    check(batches, pool, batch)
    assert other.stop() == 0


@pytest.mark.long
def test_a_worker_that_is_killed(batches: Batches, pool: LiveStack, worker: Process) -> None:
    runner = pool.start_batch_runner("runner-beside")
    batch = create(batches)
    wait_for_lines(batches, batch, 200)
    worker.kill()
    again = pool.start_worker("crashes-worker", step_s=0.002, max_running=64)
    check(batches, pool, batch)
    assert runner.stop() == 0
    again.end()
