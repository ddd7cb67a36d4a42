"""Redis is away for longer than a heartbeat may be late, and comes back with all it had."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from contract.messages import protocol
from contract.queue.redis_uptime import RedisUptime
from demo.ports import choose_ports
from tests.live import LiveStack
from tests.worker.scenes import TOKENS, Call
from tests.worker.test_histories import FaultProxy

AWAY_S = protocol.HEARTBEAT_TIMEOUT_S + 3


def test_silence_counts_only_while_redis_answers() -> None:
    now = 100.0
    uptime = RedisUptime(lambda: now)
    for _ in range(5):
        assert not uptime.is_steady
        uptime.note()
        now += 2.5
    assert uptime.is_steady
    now += protocol.MAX_UNWATCHED_S
    uptime.note()
    assert not uptime.is_steady, "others may not have come back yet"
    for _ in range(4):
        now += 2.5
        uptime.note()
    assert uptime.is_steady


async def test_answers_go_on_where_they_were(live: LiveStack) -> None:
    pool = live.with_pool("away")
    proxy = FaultProxy(choose_ports(1)[0], urlsplit(live.redis_url).port or 0)
    pool.env["REDIS_URL"] = proxy.way_to(live.redis_url)
    listener = await proxy.start()
    web, url = await asyncio.to_thread(pool.start_web, "web-away")
    worker = await asyncio.to_thread(pool.start_worker, "away", step_s=0.25)
    try:
        key = live.tenants["acme"].key
        calls = [Call(stream=stream).start(url, key) for stream in (True, False)]
        assert await asyncio.to_thread(calls[0].first.wait, 20)
        listener.close()
        proxy.cut()
        await asyncio.sleep(AWAY_S)
        listener = await proxy.start()
        for call in calls:
            await asyncio.to_thread(call.wait)
            assert call.error is None, call.error
        assert calls[0].text == calls[1].text
        assert len(calls[0].text) >= TOKENS
    finally:
        listener.close()
        proxy.cut()
        web.end()
        worker.end()
