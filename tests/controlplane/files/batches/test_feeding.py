"""Lines on their way through the queue, where something goes wrong that nobody expected."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from controlplane.errors import RateLimited
from controlplane.files.batches import feeding
from controlplane.files.batches.concurrency import Concurrency
from controlplane.files.batches.feeding import Feeder
from controlplane.files.batches.lines import Line
from controlplane.files.batches.results import Result
from controlplane.queue.batch_reply_stream import BatchReplyStream
from demo.stack import EmbeddedStack

USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


class Answered:
    reply = SimpleNamespace(is_ended=True, is_forgotten=False)

    async def whole(self) -> dict[str, Any]:
        return {"usage": USAGE}

    def leave(self) -> None:
        pass


async def found(num: int) -> AsyncIterator[Line]:
    for number in range(1, num + 1):
        body = json.dumps({"model": "tiny", "prompt": f"prompt {number}"}).encode()
        yield Line(number=number, custom_id=f"c{number}", body=body, model="tiny")


BATCH = uuid.uuid4()
PRINCIPAL = SimpleNamespace(tenant=SimpleNamespace(id=uuid.uuid4()))


@pytest.fixture
async def batch_stream(stack: EmbeddedStack) -> AsyncIterator[BatchReplyStream]:
    client = redis.asyncio.Redis.from_url(stack.env["REDIS_URL"], protocol=2)
    made = BatchReplyStream(client, f"feeding-{uuid.uuid4().hex[:8]}", BATCH, fence=1)
    await made.open()
    yield made
    await made.close()
    await client.aclose()


def a_feeder(
    batch_stream: BatchReplyStream,
    keep: Callable[[list[Result]], Awaitable[None]],
    concurrency: Concurrency,
) -> Feeder:
    return Feeder(
        batch_id=BATCH,
        endpoint="/v1/completions",
        deadline=time.time() + 60,
        principal=lambda: PRINCIPAL,  # type: ignore[arg-type, return-value]
        concurrency=concurrency,
        batch_stream=batch_stream,
        keep=keep,
    )


async def test_a_line_that_the_server_fails_on_keeps_no_other_from_its_answer(
    monkeypatch: pytest.MonkeyPatch, batch_stream: BatchReplyStream
) -> None:
    kept: list[Result] = []

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        if body.prompt == "prompt 2":
            raise ValueError("a fault of ours")
        return Answered()

    async def keep(results: list[Result]) -> None:
        kept.extend(results)

    monkeypatch.setattr(feeding, "submit_line", submit)
    monkeypatch.setattr(feeding, "MAX_ATTEMPTS", 2)
    feeder = a_feeder(batch_stream, keep, Concurrency(lambda: [], most=4))
    async with asyncio.timeout(20):
        await feeder.run(found(4))
    assert sorted(result.line for result in kept) == [1, 2, 3, 4]
    (failed,) = [result for result in kept if result.is_error]
    told = json.loads(failed.output)
    assert (told["custom_id"], told["response"]["status_code"]) == ("c2", 500)


async def test_cancelled_it_leaves_what_is_under_way_and_keeps_what_is_answered(
    monkeypatch: pytest.MonkeyPatch, batch_stream: BatchReplyStream
) -> None:
    kept: list[int] = []
    begun: list[str] = []
    cancelled: list[str] = []

    class Slow(Answered):
        def __init__(self, prompt: str) -> None:
            self.prompt = prompt

        async def whole(self) -> dict[str, Any]:
            if self.prompt != "prompt 2":
                await asyncio.Event().wait()
            return {"usage": USAGE}

    async def submit(principal: Any, body: Any, *, request_id: str, **_: Any) -> Any:
        begun.append(body.prompt)
        batch_stream.note_admitted(request_id)
        return Slow(body.prompt)

    async def keep(results: list[Result]) -> None:
        await asyncio.sleep(0.05)
        kept.extend(result.line for result in results)

    async def end(feeder: Feeder, request_id: str) -> None:
        cancelled.append(request_id)

    monkeypatch.setattr(feeding, "submit_line", submit)
    monkeypatch.setattr(Feeder, "_end", end)
    concurrency = Concurrency(lambda: [], most=3)
    monkeypatch.setattr(concurrency, "limit", lambda: 3)
    feeder = a_feeder(batch_stream, keep, concurrency)
    with concurrency.joined(BATCH):
        running = asyncio.create_task(feeder.run(found(1000)))
        async with asyncio.timeout(30):
            while "prompt 4" not in begun:
                await asyncio.sleep(0.001)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    assert len(begun) == 4
    assert (kept, cancelled) == ([2], [])
    assert batch_stream.lines_under_way == {1, 3, 4}


async def test_what_was_under_way_takes_its_place_without_waiting(
    monkeypatch: pytest.MonkeyPatch, batch_stream: BatchReplyStream
) -> None:
    for line in (1, 2, 3):
        batch_stream.note_admitted(batch_stream.request_id(line))
    asked: list[str] = []

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        asked.append(body.prompt)
        return Answered() if len(asked) > 3 else Forever()

    class Forever(Answered):
        async def whole(self) -> dict[str, Any]:
            while len(asked) < 3:
                await asyncio.sleep(0.01)
            return {"usage": USAGE}

    async def keep(results: list[Result]) -> None:
        pass

    monkeypatch.setattr(feeding, "submit_line", submit)
    feeder = a_feeder(batch_stream, keep, Concurrency(lambda: [], most=1))
    async with asyncio.timeout(20):
        await feeder.run(found(5))
    assert sorted(asked) == [f"prompt {number}" for number in range(1, 6)]
    assert batch_stream.lines_under_way == set()


async def test_what_is_under_way_waits_for_no_limit(
    monkeypatch: pytest.MonkeyPatch, batch_stream: BatchReplyStream
) -> None:
    batch_stream.note_admitted(batch_stream.request_id(2))
    kept: list[int] = []

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        if body.prompt == "prompt 1":
            raise RateLimited("spent", retry_after_s=60)
        return Answered()

    async def keep(results: list[Result]) -> None:
        kept.extend(result.line for result in results)

    monkeypatch.setattr(feeding, "submit_line", submit)
    running = asyncio.create_task(
        a_feeder(batch_stream, keep, Concurrency(lambda: [], most=4)).run(found(2))
    )
    async with asyncio.timeout(10):
        while kept != [2]:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
