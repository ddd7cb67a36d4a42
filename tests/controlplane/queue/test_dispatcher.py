"""A gateway's loops go on whatever happens to them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from contract.messages import protocol
from contract.messages.protocol import TokenEvent
from controlplane.queue import dispatcher as dispatcher_module
from controlplane.queue import known_workers, open_replies
from controlplane.queue.dispatcher import Dispatcher
from controlplane.queue.reply_reader import READ_ENTRIES
from controlplane.queue.workers import is_served
from demo.ports import choose_ports
from demo.stack import EmbeddedStack
from tests.queue_rig import BASE, QueueRig
from tests.worker.test_histories import FaultProxy


@pytest.fixture
async def rig(stack: EmbeddedStack) -> AsyncIterator[QueueRig]:
    made = QueueRig(stack.env["REDIS_URL"])
    yield made
    made.close()


@pytest.fixture
async def dispatcher(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Dispatcher]:
    monkeypatch.setattr(known_workers, "REFRESH_S", 0.05)
    made = Dispatcher(rig.url, rig.pool)
    await made.start()
    yield made
    await made.close()


async def until_served(dispatcher: Dispatcher) -> None:
    async with asyncio.timeout(10):
        while not is_served(dispatcher.workers.statuses, BASE):
            await asyncio.sleep(0.02)


async def test_a_heartbeat_that_cannot_be_read_hides_its_worker_alone(
    rig: QueueRig, dispatcher: Dispatcher
) -> None:
    for payload in (b"", b"{", b"[]", b"\xff", b'{"worker_id": 3}'):
        rig.beat("broken")
        rig.client.hset(protocol.worker_key(rig.pool, "broken"), "m", payload)
        await dispatcher.workers.refresh()
        assert dispatcher.workers.statuses == []
    rig.beat("whole")
    await until_served(dispatcher)


async def test_a_loop_that_fails_begins_again(
    rig: QueueRig, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    refresh = dispatcher.workers.refresh

    async def fail_once() -> None:
        monkeypatch.setattr(dispatcher.workers, "refresh", refresh)
        failed.set()
        raise ZeroDivisionError("what nobody expected")

    monkeypatch.setattr(dispatcher.workers, "refresh", fail_once)
    await asyncio.wait_for(failed.wait(), 10)
    rig.beat("w")
    await until_served(dispatcher)


async def test_what_is_not_in_the_queue_yet_is_not_missed_there(
    rig: QueueRig, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its admission takes longer than a reply may be silent."""
    monkeypatch.setattr(open_replies, "SILENCE_S", 0.0)
    rig.beat("w")
    admit = dispatcher._admitter.admit

    async def admit_late(*args: Any) -> Any:
        await dispatcher.replies.find_lost()
        return await admit(*args)

    monkeypatch.setattr(dispatcher._admitter, "admit", admit_late)
    job = rig.job("0" * 32)
    reply, _ = await dispatcher.submit(job)
    assert not reply.is_ended
    rig.client.delete(protocol.job_key(rig.pool, job.request_id))
    await dispatcher.replies.find_lost()
    assert reply.is_ended, "now it should have been there"
    dispatcher.replies.leave(reply)


async def test_a_batchs_request_is_there_when_its_day_is_over(
    rig: QueueRig, dispatcher: Dispatcher
) -> None:
    """Nobody may have had room for it: whoever pulls it then ends it, and gives its budget back."""
    rig.beat("w")
    job = rig.job("0" * 32, batch=True)
    day_s = 24 * 3600
    job = dataclasses.replace(job, deadline=job.created_at + day_s)
    reply, _ = await dispatcher.submit(job)
    assert rig.client.ttl(protocol.job_key(rig.pool, job.request_id)) > day_s + 3600
    dispatcher.replies.leave(reply)


async def test_a_backlog_is_read_beside_everything_else(
    rig: QueueRig, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that stood still finds a long stream: it reads it in order, and goes on serving."""
    num_entries, out = 10 * READ_ENTRIES, protocol.out_key(dispatcher.gateway_id)
    seen: list[int] = []
    turns: list[int] = []  # of the event loop: how many events there were by then
    monkeypatch.setattr(dispatcher._reply_reader, "_deliver", lambda event: seen.append(event.seq))
    await asyncio.sleep(0)
    with rig.client.pipeline(transaction=True) as backlog:
        for seq in range(num_entries):
            event = TokenEvent(request_id="0" * 32, lease=1, seq=seq, text="a")
            backlog.xadd(out, {protocol.PAYLOAD_FIELD: b"[" + event.encode() + b"]"})
        backlog.execute()
    async with asyncio.timeout(10):
        while len(seen) < num_entries:
            turns.append(len(seen))
            await asyncio.sleep(0)
    assert seen == list(range(num_entries))
    steps = [after - before for before, after in pairwise([*turns, num_entries])]
    assert max(steps) <= READ_ENTRIES


async def test_who_leaves_while_redis_is_away_is_not_forgotten(
    rig: QueueRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "CANCEL_RETRY_S", 0.05)
    proxy = FaultProxy(choose_ports(1)[0], urlsplit(rig.url).port or 0)
    listener = await proxy.start()
    rig.beat("w")
    dispatcher = Dispatcher(proxy.way_to(rig.url), rig.pool)
    await dispatcher.start()
    job = rig.job("0" * 32)
    reply, _ = await dispatcher.submit(job)
    listener.close()
    proxy.cut()
    dispatcher.replies.leave(reply)
    await asyncio.sleep(2.5)  # longer than Redis's client tries by itself
    assert b"cancel" not in rig.state(job.request_id)
    listener = await proxy.start()
    async with asyncio.timeout(10):
        while b"cancel" not in rig.state(job.request_id):
            await asyncio.sleep(0.02)
    await dispatcher.close()
    listener.close()
    proxy.cut()


async def test_it_ends_also_when_a_cancellation_gets_lost(
    rig: QueueRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `asyncio.wait_for` of Python 3.11, when what it waits for ends at that moment."""
    monkeypatch.setattr(dispatcher_module, "CANCEL_RETRY_S", 0.05)
    dispatcher = Dispatcher(rig.url, rig.pool)
    await dispatcher.start()
    lost = asyncio.Event()

    async def lose_one() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.set()
        await asyncio.sleep(60)

    dispatcher._spawn(lose_one())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await dispatcher.close()
    assert lost.is_set()
