"""The worker's scripts against a real Redis: leases, repetition, hand-back."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from contract.messages import protocol
from contract.messages.protocol import (
    Control,
    ControlMessage,
    DoneRecord,
    GenerateJob,
    Heartbeat,
    TokenEvent,
)
from contract.queue import fair_queue
from controlplane.usage.limits.admit import ADMIT, CANCEL
from demo.stack import EmbeddedStack
from tests.messages import make_heartbeat, make_job
from worker.serving.requests import MAX_ACTIVE
from worker.serving.streams import MAX_ENTRY_BYTES, Dispatch, EventUpdate, Streams

WORKER = "w1"


@dataclasses.dataclass
class Pool:
    """A pool of its own in the shared Redis, with a job in the worker's inbox."""

    name: str
    url: str
    client: Any

    def streams(self, boot_id: str = "boot-1") -> Streams:
        return Streams(self.url, pool=self.name, worker_id=WORKER, boot_id=boot_id)

    def submit(self, request_id: str = "r1") -> GenerateJob:
        job = make_job(request_id=request_id, gateway_id=f"g-{self.name}", text="x")
        args = [
            *(self.name, fair_queue.queue_key(self.name, "b"), request_id, job.encode(), "t"),
            *(fair_queue.INTERACTIVE, "", 4e9, 3600, job.gateway_id, 1, 1, 1, 0, 60, 99, 99, 0),
        ]
        verdict = self.client.eval(ADMIT, 1, protocol.job_key(self.name, request_id), *args)
        assert verdict[0] == b"ok"
        return job

    def job_hash(self, request_id: str = "r1") -> dict[bytes, bytes]:
        return dict(self.client.hgetall(protocol.job_key(self.name, request_id)))

    def events(self) -> list[TokenEvent]:
        entries = self.client.xrange(protocol.out_key(f"g-{self.name}"))
        return [event for _, fields in entries for event in protocol.unpack_events(fields[b"m"])]

    def done(self) -> list[DoneRecord]:
        entries = self.client.xrange(protocol.done_key(self.name))
        return [DoneRecord.decode(fields[b"m"]) for _, fields in entries]

    def inbox_length(self) -> int:
        return int(self.client.xlen(protocol.inbox_key(self.name, WORKER)))


@pytest.fixture
def pool(stack: EmbeddedStack) -> Pool:
    url = stack.env["REDIS_URL"]
    return Pool(uuid.uuid4().hex[:8], url, redis.Redis.from_url(url, protocol=2))


@pytest.fixture
async def streams(pool: Pool) -> AsyncIterator[Streams]:
    made = pool.streams()
    await made.prepare()
    yield made
    await made.close()


def make_news(
    entry_id: bytes,
    *,
    lease: int = 1,
    seq: int = 0,
    text: str = "a",
    request_id: str = "r1",
    ends: bool = False,
) -> EventUpdate:
    event = TokenEvent(
        request_id=request_id,
        lease=lease,
        seq=seq,
        text=text,
        finish_reason="stop" if ends else None,
    )
    done = DoneRecord(
        request_id=request_id,
        tenant_id="t",
        api_key_id="k",
        worker_id=WORKER,
        lease=lease,
        model="m",
        base_model="b",
        adapter_version_id=None,
        digests=(),
        finish_reason="stop",
        error_code=None,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=seq + 1,
        created_at=0.0,
        queue_ms=0.0,
        load_ms=0.0,
        first_token_ms=None,
        total_ms=0.0,
    )
    return EventUpdate(
        event=event,
        entry_id=entry_id,
        emitted=seq + 1,
        prompt_tokens=3,
        cached_tokens=0,
        done=done if ends else None,
    )


async def take(streams: Streams) -> tuple[bytes, int]:
    """Read the one entry and begin it. -> its id and lease."""
    (pulled,) = await streams.pull("b", 10)
    return pulled.entry_id, pulled.dispatch.lease


async def begin(streams: Streams, request_id: str = "r1") -> Dispatch:
    """Take up what lies in the inbox."""
    async for batch in streams.read_pending():
        for entry_id, payload in batch:
            if GenerateJob.decode(payload).request_id == request_id:
                return (await streams.begin([(entry_id, request_id)]))[0]
    raise AssertionError(f"{request_id} is not in the inbox")


async def test_a_request_from_inbox_to_record(pool: Pool, streams: Streams) -> None:
    job = pool.submit()
    entry_id, lease = await take(streams)
    await streams.publish(job.gateway_id, [make_news(entry_id, lease=lease)])
    await streams.publish(job.gateway_id, [make_news(entry_id, lease=lease, seq=1, ends=True)])
    assert [(event.seq, event.text) for event in pool.events()] == [(0, "a"), (1, "a")]
    assert [record.completion_tokens for record in pool.done()] == [2]
    assert pool.job_hash()[b"state"] == b"done"
    assert pool.inbox_length() == 0


async def test_what_has_ended_takes_little_room_and_less_for_long(
    pool: Pool, streams: Streams
) -> None:
    """Of a busy pool there are hundreds of thousands of them: they are kept for ten minutes."""
    job = pool.submit()
    entry_id, lease = await take(streams)
    await streams.publish(job.gateway_id, [make_news(entry_id, lease=lease, ends=True)])
    key = protocol.job_key(pool.name, "r1")
    assert pool.client.object("encoding", key) == b"ziplist"
    assert pool.client.memory_usage(key) < 400
    assert 0 < pool.client.ttl(key) <= protocol.DONE_JOB_TTL_S
    late = make_news(entry_id, lease=lease, seq=1)
    assert await streams.publish(job.gateway_id, [late]) == []  # its own, and over
    assert await streams.publish(job.gateway_id, [make_news(entry_id, lease=2)]) != []
    assert len(pool.done()) == len(pool.events()) == 1


async def test_repeating_a_flush_changes_nothing(pool: Pool, streams: Streams) -> None:
    job = pool.submit()
    entry_id, lease = await take(streams)
    for seq, ends in ((0, False), (1, True)):
        news = make_news(entry_id, lease=lease, seq=seq, ends=ends)
        for _ in range(3):
            assert await streams.publish(job.gateway_id, [news]) == []
    assert [event.seq for event in pool.events()] == [0, 1]
    assert len(pool.done()) == 1


async def test_an_entry_has_no_more_than_may_be_taken_in_at_a_time(
    pool: Pool, streams: Streams
) -> None:
    sizes = [MAX_ENTRY_BYTES // 2, MAX_ENTRY_BYTES // 3, MAX_ENTRY_BYTES, 2 * MAX_ENTRY_BYTES, 1, 1]
    for number in range(len(sizes)):
        pool.submit(f"r{number}")
    pulled = []
    while len(pulled) < len(sizes):
        pulled += await streams.pull("b", 4)
    news = [
        make_news(
            item.entry_id,
            request_id=GenerateJob.decode(item.payload).request_id,
            lease=99 if number == 4 else item.dispatch.lease,
            text="a" * sizes[number],
            ends=True,
        )
        for number, item in enumerate(pulled)
    ]
    for _ in range(2):  # the second time as after a lost reply
        refused = await streams.publish(f"g-{pool.name}", news)
        assert [item.event.request_id for item in refused] == ["r4"]
    entries = pool.client.xrange(protocol.out_key(f"g-{pool.name}"))
    lengths = [len(protocol.unpack_events(fields[b"m"])) for _, fields in entries]
    assert lengths == [2, 1, 1, 1]
    assert [len(event.text) for event in pool.events()] == [*sizes[:4], 1]
    assert len(pool.done()) == 5
    assert pool.inbox_length() == 1


async def test_an_old_lease_can_tell_nothing_and_bill_nothing(pool: Pool, streams: Streams) -> None:
    job = pool.submit()
    other = pool.submit("r2")
    entries = [pulled.entry_id for pulled in await streams.pull("b", 10)]
    successor = pool.streams("boot-2")
    dispatch = await begin(successor, job.request_id)
    assert other.request_id == "r2"
    assert (dispatch.state, dispatch.lease, dispatch.attempt) == ("running", 2, 2)

    late = make_news(entries[0], lease=1, ends=True)
    fine = make_news(entries[1], lease=1, request_id="r2")
    assert await streams.publish(job.gateway_id, [late, fine]) == [late]
    assert [event.request_id for event in pool.events()] == ["r2"]
    assert pool.done() == []
    assert pool.inbox_length() == 2
    await successor.close()


async def test_the_same_run_beginning_twice_keeps_its_lease(pool: Pool, streams: Streams) -> None:
    pool.submit()
    _, lease = await take(streams)
    again = await begin(streams)
    assert [lease, again.lease, again.attempt] == [1, 1, 1]


async def test_a_new_run_finds_what_was_left_and_what_was_told(
    pool: Pool, streams: Streams
) -> None:
    job = pool.submit()
    entry_id, lease = await take(streams)
    await streams.publish(job.gateway_id, [make_news(entry_id, lease=lease, text="abc")])

    successor = pool.streams("boot-2")
    batches = [batch async for batch in successor.read_pending()]
    assert [[entry[0] for entry in batch] for batch in batches] == [[entry_id]]
    dispatch = await begin(successor)
    assert (dispatch.emitted, dispatch.prompt_tokens, dispatch.lease) == (1, 3, 2)
    await successor.close()


async def test_a_request_handed_back_is_not_counted_as_a_crash(
    pool: Pool, streams: Streams
) -> None:
    pool.submit()
    entry_id, lease = await take(streams)
    for _ in range(2):  # repeated after a lost reply
        await streams.requeue("r1", lease, entry_id)
    assert pool.inbox_length() == 0
    news = make_news(entry_id, lease=lease, ends=True)
    assert await streams.publish(f"g-{pool.name}", [news]) == [news], "it is another's to tell of"
    assert (pool.events(), pool.done()) == ([], [])
    successor = pool.streams("boot-2")
    (pulled,) = await successor.pull("b", 10)
    assert (pulled.dispatch.attempt, pulled.dispatch.lease) == (1, 2)
    assert await successor.pull("b", 10) == []
    await successor.close()


@pytest.mark.parametrize("state", ["gone", "done"])
async def test_what_is_over_is_said_to_be(pool: Pool, streams: Streams, state: str) -> None:
    pool.submit()
    await take(streams)
    key = protocol.job_key(pool.name, "r1")
    if state == "done":
        pool.client.hset(key, "state", "done")
    else:
        pool.client.delete(key)
    assert (await begin(pool.streams("boot-2"))).state == state
    assert pool.job_hash() == {} or pool.job_hash()[b"lease"] == b"1"


async def test_a_cancelled_job_says_so(pool: Pool, streams: Streams) -> None:
    pool.submit()
    pool.client.hset(protocol.job_key(pool.name, "r1"), "cancel", 1)
    (pulled,) = await streams.pull("b", 10)
    assert pulled.dispatch.is_cancelled


async def test_scripts_survive_a_flushed_script_cache(pool: Pool, streams: Streams) -> None:
    assert await streams.pull("b", 10) == []
    pool.submit()
    pool.client.script_flush()
    assert (await take(streams))[1] == 1


async def test_an_entry_that_is_no_job_becomes_a_dead_letter(pool: Pool, streams: Streams) -> None:
    pool.submit()
    pool.client.hset(protocol.job_key(pool.name, "r1"), "m", b"\xff")
    (pulled,) = await streams.pull("b", 10)
    await streams.dead_letter(pulled.entry_id, pulled.payload, "no JSON")
    assert pool.inbox_length() == 0
    ((_, letter),) = pool.client.xrange(protocol.dead_letter_key(pool.name))
    assert (letter[b"m"], letter[b"reason"]) == (b"\xff", b"no JSON")


async def test_a_control_message_that_is_none_is_passed_over(pool: Pool, streams: Streams) -> None:
    key = protocol.control_key(pool.name, WORKER)
    cancel = ControlMessage(action=Control.CANCEL, request_id="r1")
    for payload in (b"junk", b"[]", b"{}", cancel.encode()):
        pool.client.xadd(key, {b"m": payload})
    pool.client.xadd(key, {b"x": b"no payload"})
    found = [message for _, message in await streams.read_control(b"0-0")]
    assert found == [None, None, None, cancel, None]


async def test_every_request_of_a_worker_can_be_cancelled_at_one_time(
    pool: Pool, streams: Streams
) -> None:
    key = protocol.control_key(pool.name, WORKER)
    script = pool.client.register_script(CANCEL)
    ids = [f"r{number}" for number in range(MAX_ACTIVE)]
    for begin_at in range(0, len(ids), 4):
        for request_id in ids[begin_at : begin_at + 4]:
            pool.submit(request_id)
        assert len(await streams.pull("b", 4)) == 4
    for request_id in ids:
        message = ControlMessage(action=Control.CANCEL, request_id=request_id)
        keys = [protocol.job_key(pool.name, request_id)]
        script(keys=keys, args=[pool.name, message.encode()])
    for _ in range(200):  # and another tenant's come
        pool.client.xadd(key, {b"m": b'{"action":"poke"}'}, maxlen=protocol.CONTROL_STREAM_MAX_LEN)
    found = [message for _, message in await streams.read_control(b"0-0")]
    assert [message.request_id for message in found if message and message.request_id] == ids


def test_an_event_that_is_none_costs_no_other() -> None:
    good = TokenEvent(request_id="r1", lease=1, seq=0, text="a")
    packed = b'[%s,{},7,{"request_id":1},%s]' % (good.encode(), good.encode())
    assert protocol.unpack_events(packed) == [good, good]


async def test_the_heartbeat_brings_the_gateways_silence(pool: Pool, streams: Streams) -> None:
    now = pool.client.time()[0]
    pool.client.zadd(protocol.GATEWAYS_KEY, {f"g-{pool.name}": now - 30})
    heartbeat = make_heartbeat(worker_id=WORKER, pool=pool.name)
    silence = await streams.beat(heartbeat)
    assert 29 <= silence[f"g-{pool.name}"] <= 33
    assert pool.client.zscore(protocol.workers_key(pool.name), WORKER) >= now
    stored = pool.client.hget(protocol.worker_key(pool.name, WORKER), "m")
    assert Heartbeat.decode(stored) == heartbeat
    await streams.unregister()
    assert pool.client.zscore(protocol.workers_key(pool.name), WORKER) is None


async def test_a_new_inbox_takes_the_place_of_a_lost_one(pool: Pool, streams: Streams) -> None:
    pool.client.delete(protocol.inbox_key(pool.name, WORKER))
    assert await streams.pull("b", 10) == []
    pool.submit()
    assert len(await streams.pull("b", 10)) == 1
