"""How many requests a runner has under way, beside others and shared by its batches."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest

from controlplane.files.batches.concurrency import Concurrency
from controlplane.queue.workers import WorkerStatus
from tests.messages import make_heartbeat


def worker(
    running: int = 0, *, max_running: int = 64, silent_s: float = 0.0, **fields: bool
) -> WorkerStatus:
    beat = make_heartbeat(running=running, max_running=max_running, **fields)
    return WorkerStatus(heartbeat=beat, silent_s=silent_s)


@pytest.mark.parametrize(
    ("workers", "limit"),
    [
        ([], 1),
        ([worker()], 48),
        ([worker(), worker()], 96),
        ([worker(20)], 28),
        ([worker(64)], 1),
        ([worker(), worker(silent_s=60)], 48),
        ([worker(), worker(draining=True)], 48),
        ([worker(), worker(loading=True)], 48),
        ([worker(max_running=4000)], 512),
    ],
)
def test_places_are_what_others_leave(workers: list[WorkerStatus], limit: int) -> None:
    assert Concurrency(lambda: workers, most=512).limit() == limit


async def test_own_requests_are_not_taken_for_others() -> None:
    workers = [worker()]
    concurrency = Concurrency(lambda: workers, most=512)
    batch = uuid.uuid4()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(concurrency.place(batch))
        workers[:] = [worker(10)]
        assert concurrency.limit() == 48
        workers[:] = [worker(30)]  # another runner's, or people's
        assert concurrency.limit() == 28
    assert concurrency.num_taken == 0


async def test_batches_share_the_places() -> None:
    concurrency = Concurrency(lambda: [worker(max_running=16)], most=512)  # 12 places
    first, second = uuid.uuid4(), uuid.uuid4()
    held = {first: 0, second: 0}
    over = asyncio.Event()

    async def hold(batch: uuid.UUID) -> None:
        async with concurrency.place(batch):
            held[batch] += 1
            await over.wait()
            held[batch] -= 1

    with concurrency.joined(first), concurrency.joined(second):
        tasks = [asyncio.create_task(hold(first)) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert held == {first: 6, second: 0}
        tasks += [asyncio.create_task(hold(second)) for _ in range(50)]
        await asyncio.sleep(0.05)
        assert held == {first: 6, second: 6}
        over.set()
        await asyncio.gather(*tasks)
    assert concurrency.num_taken == 0


@pytest.mark.parametrize("num_places", [1, 3])
async def test_batches_take_turns_when_there_are_fewer_places_than_batches(num_places: int) -> None:
    """However many lines of a batch wait, and however soon each is followed by another."""
    concurrency = Concurrency(lambda: [worker(max_running=64)], most=num_places)
    batches = [uuid.uuid4() for _ in range(4)]
    served: list[uuid.UUID] = []

    async def lines(batch: uuid.UUID) -> None:
        for _ in range(5):
            async with concurrency.place(batch):
                served.append(batch)
                await asyncio.sleep(0)

    async with asyncio.timeout(10):
        with contextlib.ExitStack() as stack:
            for batch in batches:
                stack.enter_context(concurrency.joined(batch))
            async with asyncio.TaskGroup() as group:
                for batch in batches:
                    for _ in range(20):
                        group.create_task(lines(batch))
    first = served[:200]
    assert all(40 <= first.count(batch) <= 60 for batch in batches)
    assert len(served) == 400 and concurrency.num_taken == 0
