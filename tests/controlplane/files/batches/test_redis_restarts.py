# ruff: noqa: F811  (fixtures)
"""A Redis of the batch's own is killed under it, and started with its file, an old one, or none."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from demo.ports import HOST
from demo.servers import Redis
from demo.stack import EmbeddedStack
from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.live import LiveStack, live_stack, wait_for
from tests.site import Site
from tests.worker.test_histories import redis_server  # noqa: F401

NUM_LINES = 400
NUM_TOKENS = 20


def restart(server: Redis, kept: str, folder: Path) -> None:
    file = server.data / "appendonly.aof"
    if kept == "an old file":
        shutil.copy(file, folder / "old.aof")
        time.sleep(1)
    pid = server.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    server.process.stop()
    if kept == "nothing":
        file.unlink()
    elif kept == "an old file":
        shutil.copy(folder / "old.aof", file)
    server.process.start()
    server.process.wait_until(server.is_ready, timeout_s=20)


def usage(live: LiveStack) -> Counter[str]:
    """What is billed of each request."""
    with psycopg.connect(live.database_url) as connection:
        rows = connection.execute("select request_id, completion_tokens from usage_usagerecord")
        return Counter(dict(rows.fetchall()))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", ["its file", "an old file", "nothing"])
def test_a_batch_whose_redis_is_killed(
    stack: EmbeddedStack, redis_server: Redis, tmp_path: Path, kept: str
) -> None:
    env = {**stack.env, "REDIS_URL": f"redis://{HOST}:{redis_server.port}/0"}
    with live_stack(env, tmp_path, database="lorikeet_redis_restarts") as live:
        web, url = live.start_web(DATABASE_POOL_SIZE="4")
        worker = live.start_worker("restarts-worker", step_s=0.02, max_running=48)
        others = [live.start_accountant(), live.start_batch_runner()]
        batches = Batches(Site(live, url, web))
        client = batches.site.client()
        line = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        batch = batches.create([chat_line(f"line-{i}", **line) for i in range(NUM_LINES)])

        def num_done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed

        for num in (40, 140, 240):
            wait_for(lambda n=num: num_done() >= n, timeout_s=90, what=f"{num} lines")  # type: ignore[misc]
            restart(redis_server, kept, tmp_path)
        done: Any = batches.ended(batch, timeout_s=180)
        assert (done.status, done.request_counts.completed) == ("completed", NUM_LINES)
        lines = batches.lines(done.output_file_id)
        assert len({line["custom_id"] for line in lines}) == len(lines) == NUM_LINES
        told = Counter({line["response"]["request_id"]: NUM_TOKENS for line in lines})
        wait_for(lambda: usage(live) == told, timeout_s=30, what="the usage")
        assert live.run("manage.py", "usage_totals") == ""
        for process in (*others, worker):
            assert process.stop() == 0, process.log.read_text()
