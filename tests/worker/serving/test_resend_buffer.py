# ruff: noqa: F811  (fixtures)
"""What a real Redis loses when it is killed, and what its worker tells it again."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import AsyncIterator

import pytest
import redis

from demo.ports import HOST
from demo.servers import Redis
from tests.worker.serving.test_streams import Pool, make_news, take
from tests.worker.test_histories import redis_server  # noqa: F401
from worker.serving.resend_buffer import KEEP_S, ResendBuffer
from worker.serving.streams import Streams


@pytest.fixture
def own(redis_server: Redis) -> Pool:
    url = f"redis://{HOST}:{redis_server.port}/0"
    return Pool(uuid.uuid4().hex[:8], url, redis.Redis.from_url(url, protocol=2))


@pytest.fixture
async def streams(own: Pool) -> AsyncIterator[Streams]:
    made = own.streams()
    await made.prepare()
    yield made
    await made.close()


def restart(server: Redis, *, keeps_file: bool) -> None:
    pid = server.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    server.process.stop()
    if not keeps_file:
        (server.data / "appendonly.aof").unlink()
    server.process.start()
    server.process.wait_until(server.is_ready, timeout_s=20)


@pytest.mark.parametrize("keeps_file", [True, False])
async def test_an_end_is_on_record_once_whatever_redis_keeps(
    redis_server: Redis, own: Pool, streams: Streams, keeps_file: bool
) -> None:
    recent = ResendBuffer(streams)
    await recent.resend_lost()
    job = own.submit()
    entry_id, lease = await take(streams)
    begun = [make_news(entry_id, lease=lease)]
    ended = [make_news(entry_id, lease=lease, seq=1, ends=True)]
    for news in (begun, ended):
        assert await streams.publish(job.gateway_id, news) == []
        recent.keep(job.gateway_id, news)
    restart(redis_server, keeps_file=keeps_file)
    assert len(own.done()) == int(keeps_file)
    for _ in range(3):
        await recent.resend_lost()
    assert [record.request_id for record in own.done()] == ["r1"]
    assert own.job_hash().get(b"state") == (b"done" if keeps_file else None)


async def test_the_same_redis_is_told_nothing_twice_and_old_ends_are_forgotten(
    redis_server: Redis, own: Pool, streams: Streams
) -> None:
    now = 0.0
    recent = ResendBuffer(streams, clock=lambda: now)
    await recent.resend_lost()
    recent.keep("g", [make_news(b"1-1", ends=True), make_news(b"1-2", request_id="open")])
    await recent.resend_lost()
    assert own.done() == []
    now += KEEP_S + 1
    restart(redis_server, keeps_file=True)
    await recent.resend_lost()  # no time has passed for a worker that could not look
    assert [record.request_id for record in own.done()] == ["r1"]
    restart(redis_server, keeps_file=False)
    await recent.resend_lost()
    assert own.done() == []
