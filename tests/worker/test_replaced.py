# ruff: noqa: F811  (fixtures)
"""Two runs of one worker at a time: one was paused, and another was started in its place."""

from __future__ import annotations

import os
import signal

import pytest

from contract.messages import protocol
from tests.live import Process, wait_for
from tests.messages import make_heartbeat
from tests.worker.scenes import (  # noqa: F401
    TOKENS,
    Scene,
    accountant,
    pool,
    restarted,
    scene,
    web,
    worker,
    worker_id,
)
from tests.worker.serving.test_streams import WORKER, Pool, begin
from tests.worker.serving.test_streams import pool as queue  # noqa: F401
from worker.serving.streams import Replaced


async def test_a_run_that_was_replaced_takes_nothing(queue: Pool) -> None:
    old, new = queue.streams("old"), queue.streams("new")
    heartbeat = make_heartbeat(worker_id=WORKER, pool=queue.name)
    for _ in range(2):
        await old.beat(heartbeat)
    queue.submit("r1")
    (pulled,) = await old.pull("b", 1)
    await new.beat(heartbeat)
    with pytest.raises(Replaced):
        await old.beat(heartbeat)
    assert (await begin(new, "r1")).lease == pulled.dispatch.lease + 1
    assert (await begin(old, "r1")).state == "replaced"
    queue.submit("r2")
    assert await old.pull("b", 1) == []
    assert len(await new.pull("b", 1)) == 1
    await old.unregister()
    assert queue.client.zscore(protocol.workers_key(queue.name), WORKER) is not None
    await new.unregister()
    assert queue.client.zscore(protocol.workers_key(queue.name), WORKER) is None
    await old.close()
    await new.close()


def test_it_ends_when_it_wakes_and_its_replacement_goes_on(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    os.killpg(worker.pid, signal.SIGSTOP)
    with restarted(scene.live, worker_id(request)) as heir:
        calls = scene.calls(streamed=2, whole=2)
        wait_for(lambda: scene.pending(worker_id(request)) == 4, what="taking up")
        os.killpg(worker.pid, signal.SIGCONT)
        for call in calls:
            assert call.wait().error is None, call.error
            assert scene.usage(call)["completion_tokens"] == TOKENS
        assert wait_for(lambda: worker.exit_code, what="the end of what was replaced") == 1
        assert heir.exit_code is None
