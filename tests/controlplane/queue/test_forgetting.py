"""Words of requests that have ended leave the disk of a real Redis, by what the gateway does."""

from __future__ import annotations

import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from controlplane.queue import forgetting
from demo.stack import EmbeddedStack
from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for
from tests.site import Site


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("forgetting")
    web, url = pool.start_web(DATABASE_POOL_SIZE="4")
    processes = [web, pool.start_worker("forgetting-worker"), pool.start_batch_runner()]
    yield Site(pool, url, web)
    for process in processes:
        process.stop()


def files(stack: EmbeddedStack) -> list[Path]:
    """Redis's, on disk."""
    return [path for path in (stack.folder / "redis").iterdir() if path.name != "redis.conf"]


def is_on_disk(stack: EmbeddedStack, words: str) -> bool:
    found = False
    for path in files(stack):
        try:
            found = found or words.encode() in path.read_bytes()
        except FileNotFoundError:  # the one that was written anew took its place
            return True
    return found


def hasten(site: Site) -> None:
    """The time of a rewrite has come."""
    site.live.redis.delete(forgetting.KEY)


def test_words_leave_the_disk_after_their_request(site: Site, stack: EmbeddedStack) -> None:
    marks = [f"mark{uuid.uuid4().hex}" for _ in range(4)]
    client = site.client()
    site.live.redis.set(forgetting.KEY, 1, ex=300)  # no rewrite before it was looked for

    def ask(mark: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": mark}]
        return client.chat.completions.create(model=FAKE_NAME, messages=messages, **fields)

    assert marks[0] in (ask(marks[0]).choices[0].message.content or "")
    for _ in ask(marks[1], stream=True):
        pass
    ask(marks[2], stream=True, max_tokens=400).close()  # a client that leaves
    batches = Batches(site)
    batch = batches.ended(batches.create([chat_line("a", marks[3])]))
    assert batch.status == "completed"
    wait_for(lambda: is_on_disk(stack, marks[0]), what="that it was on the disk")

    def is_gone() -> bool:
        hasten(site)
        return not any(is_on_disk(stack, mark) for mark in marks)

    wait_for(is_gone, timeout_s=45, what="that no word is on the disk")


def test_a_request_that_waits_is_kept(site: Site, stack: EmbeddedStack) -> None:
    """What is written anew has all that was accepted and is not over."""
    mark = f"mark{uuid.uuid4().hex}"
    site.live.redis.xadd("forgetting-kept", {"m": mark})
    hasten(site)
    size = wait_for(lambda: site.live.redis.exists(forgetting.KEY), what="a rewrite")
    assert size
    wait_for(lambda: not site.live.redis.info("persistence")["aof_rewrite_in_progress"])
    assert is_on_disk(stack, mark)
    site.live.redis.delete("forgetting-kept")


def test_what_is_deleted_from_a_stream_is_not_written_anew(stack: EmbeddedStack) -> None:
    """Its block stays in memory while another entry of it lives."""
    mark, key = f"mark{uuid.uuid4().hex}", f"forgetting-{uuid.uuid4().hex}"
    with redis.Redis.from_url(stack.env["REDIS_URL"], protocol=2) as client:
        entry = client.xadd(key, {"m": mark})
        client.xadd(key, {"m": "another"})
        client.xdel(key, entry)
        wait_for(lambda: is_on_disk(stack, mark), what="that it was on the disk")

        def is_gone() -> bool:
            client.delete(forgetting.KEY)
            forgetting.file_rewrite_if_due(client)
            return not is_on_disk(stack, mark)

        wait_for(is_gone, timeout_s=30, what="that it is gone")
        assert client.xlen(key) == 1
        client.delete(key)


def test_the_file_is_not_written_anew_all_the_time(stack: EmbeddedStack) -> None:
    with redis.Redis.from_url(stack.env["REDIS_URL"], protocol=2) as client:
        client.delete(forgetting.KEY)
        forgetting.file_rewrite_if_due(client)
        assert 0 < client.ttl(forgetting.KEY) <= 300
        assert not forgetting.file_rewrite_if_due(client)


def test_nobody_else_may_read_redis_files(stack: EmbeddedStack) -> None:
    folder = stack.folder / "redis"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_password_is_in_no_list_of_processes(stack: EmbeddedStack) -> None:
    for process in stack.processes:
        argv = " ".join(psutil.Process(process.pid).cmdline())
        assert stack.secrets.redis_password not in argv
        assert stack.secrets.s3_secret_access_key not in argv
