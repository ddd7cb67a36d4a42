"""Several runners want one batch, and what they stand on goes away under them."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from contract.messages.protocol import done_key, job_key, out_key
from contract.queue.reply_streams import batch_stream_id, pending_lines_key
from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.controlplane.files.batches.test_batch_crashes import lapse, nothing_is_left, records
from tests.live import LiveStack, Process, wait_for

NUM_LINES = 600


@pytest.fixture
def worker(pool: LiveStack) -> Iterator[Process]:
    process = pool.start_worker("contention-worker", step_s=0.02, max_running=64)
    pool.redis.delete(done_key(pool.pool))
    yield process
    for each in (*pool.named("rival-"), process):
        each.end()


def create(batches: Batches) -> Any:
    line = {"max_tokens": 20, "ignore_eos": True}
    return batches.create([chat_line(f"line-{i}", f"text {i}", **line) for i in range(NUM_LINES)])


def check(batches: Batches, pool: LiveStack, batch: Any) -> list[str]:
    """Every line is answered once. -> the requests' ids"""
    done = batches.ended(batch, timeout_s=120)
    assert done.status == "completed", done
    lines = batches.lines(done.output_file_id)
    wanted = Counter(f"line-{i}" for i in range(NUM_LINES))
    assert Counter(line["custom_id"] for line in lines) == wanted
    assert nothing_is_left(pool, batch)
    assert done.usage.output_tokens == 20 * NUM_LINES
    return [line["response"]["request_id"] for line in lines]


@pytest.mark.long
def test_runners_that_take_a_batch_from_each_other(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """All of them live, and each is woken or paused at moments that suit nobody."""
    rivals = [pool.start_batch_runner(f"rival-{number}") for number in range(3)]
    batch = create(batches)
    paused: set[int] = set()
    dice = random.Random(7)

    deadline = time.monotonic() + 90
    while num_done(batches, batch) < NUM_LINES and time.monotonic() < deadline:
        lapse(batches, batch)
        number = dice.randrange(3)
        if number in paused:
            rivals[number].signal(signal.SIGCONT)
            paused.discard(number)
        elif len(paused) < 2:
            rivals[number].signal(signal.SIGSTOP)
            paused.add(number)
        time.sleep(dice.uniform(0.1, 0.6))
    for number in paused:
        rivals[number].signal(signal.SIGCONT)
    ids = check(batches, pool, batch)
    assert Counter(record.request_id for record in records(pool)) == Counter(ids)
    for rival in rivals:
        assert rival.stop() == 0, rival.log.read_text()


def num_done(batches: Batches, batch: Any) -> int:
    return int(batches.site.client().batches.retrieve(batch.id).request_counts.completed)


def billed(pool: LiveStack, batch: Any) -> Counter[str]:
    """What the database has of the batch's requests: tokens generated, by request id."""
    prefix = f"req_{batch.id.removeprefix('batch_')[:12]}%"
    with psycopg.connect(pool.database_url) as connection:
        rows = connection.execute(
            "select request_id, completion_tokens from usage_usagerecord where request_id like %s",
            (prefix,),
        ).fetchall()
    return Counter(dict(rows))


@pytest.mark.long
def test_what_redis_forgets_is_billed_once(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """As a restart without its file: all that is known of the batch and its requests is gone."""
    runner = pool.start_batch_runner("rival-forgotten")
    accountant = pool.start_accountant("rival-accountant")
    batch = create(batches)
    batch_id = batch.id.removeprefix("batch_")
    for num in (50, 200):
        wait_for(lambda n=num: num_done(batches, batch) >= n, timeout_s=60, what=f"{num} lines")  # type: ignore[misc]
        jobs = list(pool.redis.scan_iter(job_key(pool.pool, "*"), count=1000))
        assert jobs
        pool.redis.delete(
            pending_lines_key(pool.pool, batch_id), out_key(batch_stream_id(batch_id)), *jobs
        )
    ids = check(batches, pool, batch)
    wanted = Counter(dict.fromkeys(ids, 20))
    wait_for(lambda: billed(pool, batch) == wanted, timeout_s=30, what="the usage")
    for process in (runner, accountant):
        assert process.stop() == 0, process.log.read_text()


@pytest.mark.long
def test_an_accountant_that_is_paused_and_killed_while_a_batch_runs(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """The batch does not wait for it, and each line is in the totals once."""
    runner = pool.start_batch_runner("rival-unbilled")
    accountant = pool.start_accountant("rival-paused")
    batch = create(batches)
    wait_for(lambda: num_done(batches, batch) >= 50, timeout_s=60, what="the first lines")
    accountant.signal(signal.SIGSTOP)
    wait_for(lambda: num_done(batches, batch) >= 250, timeout_s=60, what="more lines")
    accountant.signal(signal.SIGCONT)
    wait_for(lambda: num_done(batches, batch) >= 350, timeout_s=60, what="and more")
    accountant.kill()
    ids = check(batches, pool, batch)
    again = pool.start_accountant("rival-again")
    wanted = Counter(dict.fromkeys(ids, 20))
    wait_for(lambda: billed(pool, batch) == wanted, timeout_s=30, what="the usage")
    assert pool.run("manage.py", "usage_totals") == ""
    for process in (runner, again):
        assert process.stop() == 0, process.log.read_text()


@pytest.mark.long
def test_connections_that_are_cut_again_and_again(
    batches: Batches, pool: LiveStack, worker: Process
) -> None:
    """To Redis and to PostgreSQL, whatever is under way on them; and runners are killed between."""
    runner = pool.start_batch_runner("rival-cut-0")
    batch = create(batches)
    wait_for(lambda: num_done(batches, batch) >= 50, timeout_s=60, what="the first lines")
    for number in range(1, 4):
        for _ in range(8):
            time.sleep(0.2)
            pool.redis.execute_command("CLIENT", "KILL", "TYPE", "normal")
            with psycopg.connect(pool.env["DATABASE_URL"], autocommit=True) as connection:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and usename = current_user"
                    " and pid <> pg_backend_pid()"
                )
        runner.kill()
        lapse(batches, batch)
        runner = pool.start_batch_runner(f"rival-cut-{number}")
    ids = check(batches, pool, batch)
    assert Counter(record.request_id for record in records(pool)) == Counter(ids)
    assert runner.stop() == 0, runner.log.read_text()
