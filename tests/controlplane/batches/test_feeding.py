"""Lines on their way through the queue, where something goes wrong that nobody expected."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.batches import feeding
from controlplane.batches.feeding import Feeder
from controlplane.batches.lines import Line
from controlplane.batches.pace import Pace
from controlplane.batches.results import Result

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
