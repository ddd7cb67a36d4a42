"""What a runner had under way is the next one's: not sent again, not billed again, not lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from contract.messages.protocol import HEARTBEAT_TIMEOUT_S, done_key
from contract.queue.reply_streams import pending_lines_key
from controlplane.files.batches.runner import LOOK_S
from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.controlplane.files.batches.test_batch_crashes import lapse, nothing_is_left, records
from tests.controlplane.gateway.files.test_files import objects, sweep
from tests.live import LiveStack, Process, wait_for

#: Three quarters of them are a batch's.
MAX_RUNNING = 16
STEP_S = 0.03
#: A line that takes longer than a silent gateway's requests are left alone.
LONG = 450
SHORT = 100


@pytest.fixture
def worker(pool: LiveStack) -> Iterator[Process]:
    process = pool.start_worker("takeover-worker", step_s=STEP_S, max_running=MAX_RUNNING)
    pool.redis.delete(done_key(pool.pool))
    yield process
    for each in (*pool.named("taker-"), process):
        each.end()


def create(batches: Batches, num: int, num_tokens: int) -> Any:
    line = {"max_tokens": num_tokens, "ignore_eos": True}
    return batches.create([chat_line(f"line-{i}", f"text {i}", **line) for i in range(num)])


def under_way(pool: LiveStack, batch: Any) -> set[int]:
    found = pool.redis.hkeys(pending_lines_key(pool.pool, batch.id.removeprefix("batch_")))
    return {int(field) for field in found if field != b"fence"}


def fence(pool: LiveStack, batch: Any) -> int:
    key = pending_lines_key(pool.pool, batch.id.removeprefix("batch_"))
    return int(pool.redis.hget(key, "fence") or 0)


def until_busy(pool: LiveStack, batch: Any) -> set[int]:
    """The lines under way once there are as many as there may be."""
    most = int(MAX_RUNNING * 0.75)
    wait_for(lambda: len(under_way(pool, batch)) >= most, timeout_s=60, what="lines under way")
    return under_way(pool, batch)


def all_lines(batches: Batches, done: Any) -> list[dict[str, Any]]:
    return batches.lines(done.output_file_id) + batches.lines(done.error_file_id)


def check(batches: Batches, pool: LiveStack, batch: Any, num: int) -> Any:
    """Every line is answered once and billed once."""
    done = batches.ended(batch, timeout_s=120)
    assert done.status == "completed", done
    lines = batches.lines(done.output_file_id)
    assert Counter(line["custom_id"] for line in lines) == Counter(f"line-{i}" for i in range(num))
    billed = Counter(record.request_id for record in records(pool))
    assert billed == Counter(line["response"]["request_id"] for line in lines)
    assert {record.finish_reason for record in records(pool)} == {"length"}
    assert nothing_is_left(pool, batch)
    return done


def test_what_is_under_way_goes_on_without_a_runner(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    num = 15
    batch = create(batches, num, LONG)
    first = pool.start_batch_runner("taker-first")
    left = until_busy(pool, batch)
    first.kill()
    assert not records(pool)
    killed_at = time.monotonic()
    wait_for(lambda: len(records(pool)) == len(left), timeout_s=60, what="their ends")
    assert time.monotonic() - killed_at > HEARTBEAT_TIMEOUT_S
    assert under_way(pool, batch) == left
    lapse(batches, batch)
    last = pool.start_batch_runner("taker-last")
    check(batches, pool, batch, num)
    assert last.stop() == 0, last.log.read_text()


def test_a_batch_is_answered_where_it_was_taken_in(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """A runner of another pool, on the same database, has neither its workers nor its replies."""
    other = pool.with_pool("takeover-elsewhere").start_batch_runner("taker-stranger")
    batch = create(batches, 3, SHORT)
    time.sleep(2 * LOOK_S)
    assert batches.site.client().batches.retrieve(batch.id).status == "validating"
    runner = pool.start_batch_runner("taker-own")
    check(batches, pool, batch, 3)
    assert (runner.stop(), other.stop()) == (0, 0)


@pytest.mark.long
def test_runners_that_are_killed_while_they_take_over(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    num = 40
    batch = create(batches, num, SHORT)
    runner = pool.start_batch_runner("taker-0")
    until_busy(pool, batch)
    for number in range(1, 6):
        before = fence(pool, batch)
        runner.kill()
        lapse(batches, batch)
        runner = pool.start_batch_runner(f"taker-{number}")
        wait_for(lambda b=before: fence(pool, batch) > b, timeout_s=30, what="the takeover")  # type: ignore[misc]
        time.sleep(0.03 * number)
    check(batches, pool, batch, num)


@pytest.mark.parametrize(
    ("how", "has_runner"),
    [
        ("cancelled", False),
        pytest.param("expired", False, marks=pytest.mark.long),
        pytest.param("deleted", False, marks=pytest.mark.long),
        ("deleted", True),
        pytest.param("cancelled", True, marks=pytest.mark.long),
        pytest.param("expired", True, marks=pytest.mark.long),
    ],
)
def test_a_batch_that_is_stopped_with_lines_under_way(
    batches: Batches, pool: LiveStack, worker: Process, how: str, has_runner: bool
) -> None:
    """What was answered by then is in its output, what runs is cancelled, nothing runs twice.

    deleted  its input file: its bytes are there until every line is told of, and then no more
    """
    num_tokens = (SHORT, LONG)
    batch = batches.create(
        [chat_line(f"line-{i}", max_tokens=num_tokens[i % 2], ignore_eos=True) for i in range(60)]
    )
    runner = pool.start_batch_runner("taker-gone")
    num_left = len(until_busy(pool, batch))
    if not has_runner:
        runner.kill()
    wait_for(lambda: len(records(pool)) >= num_left // 2, timeout_s=60, what="the short ones")
    client = batches.site.client()
    if how == "cancelled":
        assert client.batches.cancel(batch.id).status == "cancelling"
    elif how == "deleted":
        client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)
    else:
        batches.set(batch, "expires_at = now()")
    if not has_runner:
        lapse(batches, batch)
        runner = pool.start_batch_runner("taker-ending")
    done = batches.ended(batch)
    assert done.status == ("failed" if how == "deleted" else how)
    if how == "deleted":
        assert [error.code for error in done.errors.data] == ["input_file_gone"]
        sweep(batches.site)
        pk = batch.input_file_id.removeprefix("file-")
        assert not any(pk in key for key in objects(batches.site, "acme"))
    found = all_lines(batches, done)
    assert Counter(line["custom_id"] for line in found) == Counter(f"line-{i}" for i in range(60))
    answered = {line["response"]["request_id"] for line in batches.lines(done.output_file_id)}
    assert len(answered) == done.request_counts.completed >= num_left // 2
    ends = Counter((record.request_id, record.finish_reason) for record in records(pool))
    assert set(ends.values()) == {1}
    assert {request_id for request_id, reason in ends if reason == "length"} == answered
    assert {reason for _, reason in ends} == {"length", "cancelled"}
    assert len(ends) == num_left or has_runner
    assert nothing_is_left(pool, batch)
    assert runner.stop() == 0, runner.log.read_text()
