"""A batch's reply stream against a real Redis: what is in it, for whom, and who may send."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import ANY

import pytest

from contract.messages.protocol import (
    GATEWAYS_KEY,
    WORKER_GRACE_S,
    AdapterRef,
    GenerateJob,
    out_key,
)
from contract.queue.reply_streams import batch_stream_id, pending_lines_key
from controlplane.errors import RateLimited, Unavailable
from controlplane.queue.batch_reply_stream import BatchReplyStream, Fenced, line_request_id
from controlplane.queue.dispatcher import Dispatcher
from controlplane.queue.open_replies import SILENCE_S
from controlplane.usage.limits.admit import Limits, Policy
from demo.stack import EmbeddedStack
from tests.queue_rig import QueueRig


@dataclasses.dataclass
class Scene:
    """A pool with a worker, and a batch."""

    rig: QueueRig
    batch_id: uuid.UUID = dataclasses.field(default_factory=uuid.uuid4)

    def job(self, batch_stream: BatchReplyStream, line: int) -> GenerateJob:
        return dataclasses.replace(
            self.rig.job("0" * 32, batch=True),
            request_id=batch_stream.request_id(line),
            gateway_id=batch_stream.gateway_id,
        )

    @property
    def pending_lines(self) -> dict[bytes, bytes]:
        return dict(self.rig.client.hgetall(pending_lines_key(self.rig.pool, self.batch_id.hex)))

    @property
    def num_entries(self) -> int:
        return int(self.rig.client.xlen(out_key(batch_stream_id(self.batch_id.hex))))

    def answer(self, num: int = 1) -> None:
        """Have the worker answer so many of what waits."""
        for _ in range(num):
            (taken,) = self.rig.pull()
            assert self.rig.publish(taken)


@pytest.fixture
def scene(stack: EmbeddedStack) -> Scene:
    rig = QueueRig(stack.env["REDIS_URL"])
    rig.beat("w")
    return Scene(rig)


@pytest.fixture
async def runner(scene: Scene) -> AsyncIterator[Dispatcher]:
    made = Dispatcher(scene.rig.url, scene.rig.pool)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def other(scene: Scene) -> AsyncIterator[Dispatcher]:
    made = Dispatcher(scene.rig.url, scene.rig.pool)
    await made.start()
    yield made
    await made.close()


async def test_the_next_runner_reads_what_came_and_waits_for_the_rest(
    scene: Scene, runner: Dispatcher, other: Dispatcher
) -> None:
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        for line in (1, 2, 3):
            reply, _ = await runner.submit(scene.job(batch_stream, line), batch_stream=batch_stream)
            runner.replies.leave(reply)
    scene.answer(2)
    async with other.batch_stream(scene.batch_id, 2) as batch_stream:
        assert batch_stream.lines_under_way == {1, 2, 3}
        replies = [
            (await other.submit(scene.job(batch_stream, line), batch_stream=batch_stream))[0]
            for line in (1, 2, 3)
        ]
        assert [reply.is_ended for reply in replies] == [True, True, False]
        assert b"cancel" not in scene.rig.state(replies[2].request_id)
        scene.answer()
        async with asyncio.timeout(5):
            assert [event.text for event in await replies[2].take()] == ["x"]
    assert len(scene.rig.done()) == 3


async def test_news_come_at_once_to_a_batch_stream_that_was_just_opened(
    scene: Scene, runner: Dispatcher
) -> None:
    """The reader waits for its own stream at that moment."""
    await asyncio.sleep(0.2)
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        reply, _ = await runner.submit(scene.job(batch_stream, 1), batch_stream=batch_stream)
        scene.answer()
        async with asyncio.timeout(1):
            await reply.take()


async def test_what_answers_is_what_was_admitted_whatever_its_name_means_now(
    scene: Scene, runner: Dispatcher, other: Dispatcher
) -> None:
    blend = (
        AdapterRef(digest="a" * 64, config_key="c", tensors_key="t", num_bytes=1, weight=0.5),
        AdapterRef(digest="b" * 64, config_key="c", tensors_key="t", num_bytes=1),
    )
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        job = dataclasses.replace(scene.job(batch_stream, 1), adapters=blend, created_at=1.5)
        await runner.submit(job, batch_stream=batch_stream)
        assert batch_stream.as_admitted(job) is job
    async with other.batch_stream(scene.batch_id, 2) as batch_stream:
        now = scene.job(batch_stream, 1)
        admitted = batch_stream.as_admitted(now)
        assert (admitted.adapters, admitted.created_at) == (blend, 1.5)
        assert batch_stream.as_admitted(scene.job(batch_stream, 2)).created_at != 1.5
        batch_stream.try_again(1)
        again = scene.job(batch_stream, 1)
        assert batch_stream.as_admitted(again) is again


async def test_who_was_given_up_can_neither_open_nor_begin(
    scene: Scene, runner: Dispatcher, other: Dispatcher
) -> None:
    async with (
        runner.batch_stream(scene.batch_id, 1) as old,
        other.batch_stream(scene.batch_id, 2) as new,
    ):
        job = scene.job(old, 7)
        with pytest.raises(Fenced):
            await runner.submit(job, batch_stream=old)
        assert scene.rig.state(job.request_id) == {}
        assert scene.pending_lines == {b"fence": b"2"}
        with pytest.raises(Fenced):
            async with runner.batch_stream(scene.batch_id, 1):
                raise AssertionError
        await new.close()
        with pytest.raises(Fenced):  # nor when the batch has ended
            await runner.submit(job, batch_stream=old)


async def test_a_refusal_leaves_nothing(scene: Scene, runner: Dispatcher) -> None:
    limits = Limits(policies=(Policy(id="p", requests_per_minute=1),))
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        await runner.submit(scene.job(batch_stream, 1), limits, batch_stream=batch_stream)
        with pytest.raises(RateLimited):
            await runner.submit(scene.job(batch_stream, 2), limits, batch_stream=batch_stream)
        assert batch_stream.lines_under_way == {1}
    assert scene.pending_lines == {b"fence": b"1", b"1": ANY}


async def test_redis_holds_what_is_under_way_and_not_the_batch(
    scene: Scene, runner: Dispatcher
) -> None:
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        for line in range(1, 101):
            reply, _ = await runner.submit(scene.job(batch_stream, line), batch_stream=batch_stream)
            scene.answer()
            async with asyncio.timeout(5):
                await reply.take()
            runner.replies.leave(reply)
            if line % 10 == 0:
                await batch_stream.settle(set(range(line - 9, line + 1)))
            assert len(scene.pending_lines) <= 11 and scene.num_entries <= 10
        assert scene.pending_lines == {b"fence": b"1"} and scene.num_entries == 0
        await batch_stream.settle({1, 2, 3})  # again, it does nothing


async def test_a_runner_killed_before_it_could_tidy_up_leaves_it_to_the_next(
    scene: Scene, runner: Dispatcher, other: Dispatcher
) -> None:
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        for line in (1, 2):
            await runner.submit(scene.job(batch_stream, line), batch_stream=batch_stream)
    scene.answer(2)
    async with other.batch_stream(scene.batch_id, 2) as batch_stream:
        await batch_stream.settle({1, 5})  # 1 has a result
        assert batch_stream.lines_under_way == {2}
        assert scene.pending_lines == {b"fence": b"2", b"2": ANY}
        assert scene.num_entries == 1


async def test_an_attempt_that_failed_tells_the_next_runner_so(
    scene: Scene, runner: Dispatcher, other: Dispatcher
) -> None:
    """It was killed between the failure and the next attempt."""
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        first, _ = await runner.submit(scene.job(batch_stream, 1), batch_stream=batch_stream)
        scene.answer()
        batch_stream.try_again(1)
        await batch_stream.settle(set())
        assert batch_stream.request_id(1) != first.request_id
    async with other.batch_stream(scene.batch_id, 2) as batch_stream:
        assert batch_stream.request_id(1) == first.request_id
        reply, _ = await other.submit(scene.job(batch_stream, 1), batch_stream=batch_stream)
        assert reply.is_ended
        batch_stream.try_again(1)
        second, _ = await other.submit(scene.job(batch_stream, 1), batch_stream=batch_stream)
        assert not second.is_ended
        await batch_stream.settle(set())
        assert scene.num_entries == 0
        assert json.loads(scene.pending_lines[b"1"])["attempt"] == 2


async def test_a_request_that_redis_lost_and_gets_again_has_other_leases(
    scene: Scene, runner: Dispatcher
) -> None:
    """The worker that still runs the lost one can end nothing but its own."""
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        job = scene.job(batch_stream, 1)
        await runner.submit(job, batch_stream=batch_stream)
        (lost,) = scene.rig.pull("w1")
        scene.rig.client.delete(f"job:{{{scene.rig.pool}}}:{job.request_id}")
        batch_stream.send_again(1)
        await asyncio.sleep(1.1)  # it is noticed after seconds; leases count them
        await runner.submit(job, batch_stream=batch_stream)
        (taken,) = scene.rig.pull("w2")
        assert not scene.rig.publish(lost, worker="w1")
        assert scene.rig.publish(taken, worker="w2")
    assert {record.request_id for record in scene.rig.done()} == {job.request_id}


def test_ids_of_a_batch_lie_together_and_are_all_different() -> None:
    batch_id = uuid.uuid4()
    ids = {line_request_id(batch_id, line, attempt) for line in range(1000) for attempt in (1, 2)}
    assert len(ids) == 2000
    assert {len(each) for each in ids} == {len("req_") + 32}
    assert {each[: len("req_") + 12] for each in ids} == {f"req_{batch_id.hex[:12]}"}
    assert line_request_id(uuid.uuid4(), 1, 1) not in ids


async def test_who_is_silent_is_forgotten_before_there_are_many(
    scene: Scene, runner: Dispatcher
) -> None:
    """Workers read all of them with each heartbeat, and batches come and go."""
    client, ended = scene.rig.client, batch_stream_id(scene.batch_id.hex)
    async with runner.batch_stream(scene.batch_id, 1):
        await runner._reply_reader.say_alive()
    now = client.zscore(GATEWAYS_KEY, ended)
    client.zadd(GATEWAYS_KEY, {ended: now - WORKER_GRACE_S - 1})
    await runner._reply_reader.say_alive()
    assert client.zscore(GATEWAYS_KEY, ended) is None
    assert client.zscore(GATEWAYS_KEY, runner.gateway_id) is not None


async def test_what_redis_lost_is_not_cancelled_when_it_is_sent_again(
    scene: Scene, runner: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is hardly back, and what is sent there comes in any order."""
    is_back = asyncio.Event()
    cancel = runner._send_cancel

    async def late(request_id: str) -> None:
        await is_back.wait()
        await cancel(request_id)

    monkeypatch.setattr(runner, "_send_cancel", late)
    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        job = scene.job(batch_stream, 1)
        lost, _ = await runner.submit(job, batch_stream=batch_stream)
        scene.rig.client.delete(f"job:{{{scene.rig.pool}}}:{job.request_id}")
        lost.heard_at -= SILENCE_S + 1
        await runner.replies.find_lost()
        assert lost.is_forgotten
        runner.replies.leave(lost)
        batch_stream.send_again(1)
        await runner.submit(job, batch_stream=batch_stream)
        is_back.set()
        await asyncio.sleep(0.3)
        assert b"cancel" not in scene.rig.state(job.request_id)


async def test_what_came_before_its_admission_was_heard_of_is_not_lost(
    scene: Scene, runner: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis took the line, the worker answered it, and the word of the first got lost."""
    admit = runner._admitter.admit

    async def unheard(*args: Any) -> Any:
        await admit(*args)
        scene.answer()
        await asyncio.sleep(0.3)  # it is read
        raise ConnectionError

    async with runner.batch_stream(scene.batch_id, 1) as batch_stream:
        job = scene.job(batch_stream, 1)
        monkeypatch.setattr(runner._admitter, "admit", unheard)
        with pytest.raises(Unavailable):
            await runner.submit(job, batch_stream=batch_stream)
        monkeypatch.setattr(runner._admitter, "admit", admit)
        reply, _ = await runner.submit(job, batch_stream=batch_stream)
        assert reply.is_ended
        assert [event.text for event in await reply.take()] == ["x"]
