# ruff: noqa: F811  (fixtures)
"""A worker that was told to drain is told to resume while its requests run."""

from __future__ import annotations

import signal
import time

import pytest

from contract.messages import protocol
from tests.live import Process, wait_for
from tests.worker.scenes import (  # noqa: F401
    TOKENS,
    Scene,
    accountant,
    pool,
    scene,
    web,
    worker,
    worker_id,
)

#: A worker that polls often sees an order at once.
SEEN_S = 0.5


def order(scene: Scene, name: str, action: protocol.Control) -> None:
    """As `controlplane.operator.pool` sends it."""
    payload = protocol.ControlMessage(action=action).encode()
    scene.live.redis.xadd(
        protocol.control_key(scene.live.pool, name), {protocol.PAYLOAD_FIELD: payload}
    )


def wait_until_draining(scene: Scene, name: str, *, is_so: bool) -> None:
    wait_for(lambda: scene.live.heartbeat(name).draining is is_so, what=f"draining: {is_so}")


def test_a_worker_that_drains_is_resumed(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    name = worker_id(request)
    first = scene.calls(streamed=1, whole=1)
    wait_for(lambda: scene.pending(name) == 2, what="taking up")
    order(scene, name, protocol.Control.DRAIN)
    wait_until_draining(scene, name, is_so=True)
    (waits,) = scene.calls(streamed=0, whole=1)
    time.sleep(SEEN_S)
    assert scene.pending(name) <= 2
    order(scene, name, protocol.Control.RESUME)
    wait_until_draining(scene, name, is_so=False)
    for call in (*first, waits, *scene.calls(streamed=1, whole=1)):
        assert call.wait().error is None, call.error
        assert scene.usage(call)["completion_tokens"] == TOKENS
    time.sleep(SEEN_S)
    assert worker.exit_code is None
    order(scene, name, protocol.Control.DRAIN)  # again, now to its end
    assert wait_for(lambda: worker.exit_code is not None, what="the worker's end")
    assert worker.exit_code == 0


def test_what_its_supervisor_ends_is_not_resumed(
    scene: Scene, worker: Process, request: pytest.FixtureRequest
) -> None:
    name = worker_id(request)
    calls = scene.calls(streamed=1, whole=1)
    wait_for(lambda: scene.pending(name) == 2, what="taking up")
    worker.signal(signal.SIGTERM)
    wait_until_draining(scene, name, is_so=True)
    order(scene, name, protocol.Control.RESUME)
    for call in calls:
        assert call.wait().error is None, call.error
    assert wait_for(lambda: worker.exit_code is not None, what="the worker's end")
    assert worker.exit_code == 0
