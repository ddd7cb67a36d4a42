"""Lines on their way through the queue, where something goes wrong that nobody expected."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.batches import feeding
from controlplane.batches.feeding import Drained, Feeder
from controlplane.batches.lines import Line
from controlplane.batches.pace import Pace
from controlplane.batches.results import Result
from controlplane.errors import InternalError, Unavailable

USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}


class Answered:
    async def whole(self) -> dict[str, Any]:
        return {"usage": USAGE}

    def leave(self) -> None:
        pass


async def found(num: int) -> AsyncIterator[Line]:
    for number in range(1, num + 1):
        body = json.dumps({"model": "tiny", "prompt": f"prompt {number}"}).encode()
        yield Line(number=number, custom_id=f"c{number}", body=body, model="tiny")


async def test_a_line_that_the_server_fails_on_keeps_no_other_from_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Result] = []

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        if body.prompt == "prompt 2":
            raise ValueError("a fault of ours")
        return Answered()

    async def keep(results: list[Result]) -> None:
        kept.extend(results)

    monkeypatch.setattr(feeding, "submit", submit)
    monkeypatch.setattr(feeding, "MAX_ATTEMPTS", 2)
    feeder = Feeder(
        batch_id=uuid.uuid4(),
        endpoint="/v1/completions",
        deadline=time.time() + 60,
        principal=lambda: None,  # type: ignore[arg-type, return-value]
        pace=Pace(lambda: [], most=4),
        keep=keep,
    )
    async with asyncio.timeout(20):
        await feeder.run(found(4))
    assert sorted(result.line for result in kept) == [1, 2, 3, 4]
    (failed,) = [result for result in kept if result.is_error]
    told = json.loads(failed.output)
    assert (told["custom_id"], told["response"]["status_code"]) == ("c2", 500)


async def test_told_to_drain_it_ends_what_is_under_way_and_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    begun: list[str] = []
    left: list[str] = []
    answers = asyncio.Event()

    @dataclasses.dataclass
    class Slow:
        prompt: str
        is_ended: bool = False

        async def whole(self) -> dict[str, Any]:
            await answers.wait()
            self.is_ended = True
            return {"usage": USAGE}

        def leave(self) -> None:
            if not self.is_ended:
                left.append(self.prompt)

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        begun.append(body.prompt)
        return Slow(body.prompt)

    async def keep(results: list[Result]) -> None:
        kept.extend(result.line for result in results)

    monkeypatch.setattr(feeding, "submit", submit)
    pace = Pace(lambda: [], most=3)
    monkeypatch.setattr(pace, "limit", lambda: 3)
    batch_id = uuid.uuid4()
    feeder = Feeder(
        batch_id=batch_id,
        endpoint="/v1/completions",
        deadline=time.time() + 60,
        principal=lambda: None,  # type: ignore[arg-type, return-value]
        pace=pace,
        keep=keep,
    )
    with pace.joined(batch_id):
        running = asyncio.create_task(feeder.run(found(1000)))
        async with asyncio.timeout(30):
            while len(begun) < 3:
                await asyncio.sleep(0.01)
            feeder.drain()
            await asyncio.sleep(0.1)
            assert not running.done()
            answers.set()
            with pytest.raises(Drained):
                await running
    assert len(begun) == 3
    assert sorted(kept) == [1, 2, 3]
    assert left == []


@pytest.mark.parametrize("refusal", ["asked", "answered"])
async def test_told_to_drain_it_sits_out_no_refusal(
    monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """What is under way when the drain begins may be refused after it, and is another's then."""
    begun, drained = asyncio.Event(), asyncio.Event()

    class Failing(Answered):
        async def whole(self) -> dict[str, Any]:
            begun.set()
            await drained.wait()
            raise InternalError("The worker was lost.")

    async def submit(principal: Any, body: Any, **_: Any) -> Any:
        if refusal == "answered":
            return Failing()
        begun.set()
        await drained.wait()
        raise Unavailable("The queue is full.", retry_after_s=60)

    async def keep(results: list[Result]) -> None:
        raise AssertionError(results)

    monkeypatch.setattr(feeding, "submit", submit)
    monkeypatch.setattr("random.uniform", lambda low, high: 30.0)
    feeder = Feeder(
        batch_id=uuid.uuid4(),
        endpoint="/v1/completions",
        deadline=time.time() + 600,
        principal=lambda: None,  # type: ignore[arg-type, return-value]
        pace=Pace(lambda: [], most=4),
        keep=keep,
    )
    async with asyncio.timeout(20):
        running = asyncio.create_task(feeder.run(found(1)))
        await begun.wait()
        feeder.drain()
        drained.set()
        with pytest.raises(Drained):
            await running
