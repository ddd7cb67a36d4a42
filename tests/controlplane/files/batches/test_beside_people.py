"""A batch takes what is left: who waits for an answer does not wait for a batch."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from tests.controlplane.files.batches.conftest import Batches, chat_line
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for

STEP_S = 0.01
NUM_ASKED = 25
#: A batch may cost an interactive request so much of its first token's time.
MAX_FACTOR, MAX_MORE_S = 1.5, 0.05


def first_token_s(batches: Batches) -> float:
    """The median time to the first word of a stream."""
    client = batches.site.client()
    found = []
    for _ in range(NUM_ASKED):
        started = time.perf_counter()
        stream = client.chat.completions.create(
            model=FAKE_NAME, messages=[{"role": "user", "content": "hello there"}], stream=True
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                found.append(time.perf_counter() - started)
                break
        stream.close()
    return statistics.median(found)


@pytest.mark.alone
def test_the_first_token_comes_as_fast_beside_a_batch(
    batches: Batches, pool: LiveStack, record_testsuite_property: Any
) -> None:
    worker = pool.start_worker("people-worker", step_s=STEP_S, max_running=16)
    runner = pool.start_batch_runner()
    first_token_s(batches)  # so that what is loaded once is loaded
    alone = first_token_s(batches)
    batch = batches.create([chat_line(f"{i}", ignore_eos=True, max_tokens=300) for i in range(500)])

    def running() -> int:
        heartbeat = pool.heartbeat("people-worker")
        return heartbeat.running if heartbeat else 0

    wait_for(lambda: running() >= 10, timeout_s=30, what="the batch's requests")
    beside = first_token_s(batches)
    assert running() >= 6, "the batch goes on"
    record_testsuite_property("first_token_ms", [round(1000 * s, 1) for s in (alone, beside)])
    assert beside < alone * MAX_FACTOR + MAX_MORE_S, (alone, beside)
    batches.site.client().batches.cancel(batch.id)
    batches.ended(batch)
    for process in (runner, worker):
        assert process.stop() == 0, process.log.read_text()
