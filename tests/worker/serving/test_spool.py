"""Records on the disk while Redis is away."""

from __future__ import annotations

from pathlib import Path

from demo.stack import EmbeddedStack
from tests.worker.serving.test_streams import Pool, begin, make_news, pool, streams, take  # noqa: F401
from worker.serving.spool import Spool
from worker.serving.streams import Streams


async def test_what_was_spooled_is_published_once(
    pool: Pool,  # noqa: F811
    streams: Streams,  # noqa: F811
    stack: EmbeddedStack,
    tmp_path: Path,
) -> None:
    job = pool.submit()
    entry_id, lease = await take(streams)
    path = tmp_path / "spool.jsonl"
    spool = Spool(path)
    news = make_news(entry_id, lease=lease, ends=True)
    for _ in range(3):
        spool.add(job.gateway_id, [news])
    for _ in range(2):  # the next run may die while it does this
        for gateway_id, item in Spool(path).read():
            assert await streams.publish(gateway_id, [item]) == []
    assert [record.request_id for record in pool.done()] == ["r1"]
    assert pool.inbox_length() == 0
    spool.clear()
    assert Spool(path).read() == []


async def test_a_record_outlives_redis_and_a_torn_line(
    pool: Pool,  # noqa: F811
    streams: Streams,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "spool.jsonl"
    Spool(path).add("g", [make_news(b"1-1", ends=True), make_news(b"1-2", request_id="open")])
    with path.open("a") as file:
        file.write('{"gateway": "g", "ev')
    ((_, item),) = Spool(path).read()
    await streams.publish("g", [item])  # Redis knows nothing of the job
    assert [record.request_id for record in pool.done()] == ["r1"]


async def test_another_lease_makes_a_spooled_record_void(
    pool: Pool,  # noqa: F811
    streams: Streams,  # noqa: F811
    tmp_path: Path,
) -> None:
    pool.submit()
    entry_id, lease = await take(streams)
    spool = Spool(tmp_path / "spool.jsonl")
    spool.add("g", [make_news(entry_id, lease=lease, ends=True)])
    successor = pool.streams("boot-2")
    await begin(successor)
    ((_, item),) = spool.read()
    assert await streams.publish("g", [item]) == [item]
    assert pool.done() == []
    await successor.close()
