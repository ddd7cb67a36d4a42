"""A gateway's loops go on whatever happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from controlplane import jobs
from controlplane.jobs import Dispatcher
from controlplane.workers import is_served
from demo.stack import EmbeddedStack
from tests.queue_rig import BASE, QueueRig
from worker import protocol


@pytest.fixture
async def rig(stack: EmbeddedStack) -> AsyncIterator[QueueRig]:
    made = QueueRig(stack.env["REDIS_URL"])
    yield made
    made.close()


@pytest.fixture
async def dispatcher(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Dispatcher]:
    monkeypatch.setattr(jobs, "WORKERS_REFRESH_S", 0.05)
    made = Dispatcher(rig.url, rig.pool)
    await made.start()
    yield made
    await made.close()


async def until_served(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(10):
        while not is_served(dispatcher.known_workers, BASE):
            await asyncio.sleep(0.02)


async def test_a_heartbeat_that_cannot_be_read_hides_its_worker_alone(
    rig: QueueRig, dispatcher: Dispatcher
) -> None:
    for payload in (b"", b"{", b"[]", b"\xff", b'{"worker_id": 3}'):
        rig.beat("broken")
        rig.client.hset(protocol.worker_key(rig.pool, "broken"), "m", payload)
        await dispatcher._refresh_workers()
        assert dispatcher.known_workers == []
    rig.beat("whole")
    await until_served(dispatcher)


async def test_a_loop_that_fails_begins_again(
    rig: QueueRig, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    refresh = dispatcher._refresh_workers

    async def fail_once() -> None:
        monkeypatch.setattr(dispatcher, "_refresh_workers", refresh)
        failed.set()
        raise ZeroDivisionError("what nobody expected")

    monkeypatch.setattr(dispatcher, "_refresh_workers", fail_once)
    await asyncio.wait_for(failed.wait(), 10)
    rig.beat("w")
    await until_served(dispatcher)
