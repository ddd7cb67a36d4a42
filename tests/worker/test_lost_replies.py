# ruff: noqa: F811  (fixtures)
"""What Redis has done and a worker does not know of, because the reply is on its way or lost."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from contract.messages import protocol
from contract.queue import fair_queue, scripts
from demo.ports import choose_ports
from tests.fakes import FAKE_NAME, fake_config
from tests.live import wait_for
from tests.messages import make_job
from tests.worker.scenes import (  # noqa: F401
    STEP_S,
    TOKENS,
    Call,
    Scene,
    accountant,
    pool,
    restarted,
    scene,
    web,
)
from tests.worker.test_histories import FaultProxy
from worker.config import WorkerConfig
from worker.serving.requests import LOOKAHEAD, Requests
from worker.serving.streams import Dispatch, Streams
from worker.serving.tasks import Tasks


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    return fake_config(tmp_path, worker_id="w", pool="p", redis_url="redis://localhost:1")


async def test_a_cancellation_may_come_before_what_it_cancels(config: WorkerConfig) -> None:
    sent: list[Any] = []
    errors: list[BaseException] = []
    streams = Streams(config.redis_url, pool="p", worker_id="w", boot_id="b")
    requests = Requests(
        config, streams, send=sent.append, fetch=lambda *_: None, tasks=Tasks(errors.append)
    )
    requests.expect()
    requests.cancel("r1")
    for number in (1, 2):
        job = make_job(request_id=f"r{number}", text="x")
        entry_id = f"{number}-0".encode()
        requests.take_up(entry_id, job, Dispatch(state="queued", lease=1, attempt=1))
    assert len(requests) == 1
    assert requests.flusher.unsent == {b"1-0"}, "its end is to be told"
    requests.expect()
    requests.take_up(b"3-0", make_job(request_id="r1", text="x"), Dispatch(state="queued"))
    assert len(requests) == 2
    await requests.leave_all()
    await streams.close()


def test_a_full_worker_finds_what_it_does_not_know_of(scene: Scene) -> None:
    live, name = scene.live, "full"
    slow = {"step_s": STEP_S * 5, "max_running": 1, "LORIKEET_DRAIN_TIMEOUT_S": "1"}
    worker = live.start_worker(name, **slow)  # type: ignore[arg-type]
    try:
        calls = scene.calls(streamed=0, whole=LOOKAHEAD + 1)
        wait_for(lambda: scene.pending(name) == len(calls), what="a full worker")
        os.killpg(worker.pid, signal.SIGSTOP)
        key = live.tenants["acme"].key
        calls.append(Call(stream=False).start(scene.url, key))
        queue = fair_queue.queue_key(live.pool, FAKE_NAME)
        args = [live.pool, name, live.heartbeat(name).boot_id, 4, protocol.INBOX_GROUP]  # type: ignore[union-attr]
        keys = [queue, protocol.inbox_key(live.pool, name), "-"]
        take = functools.partial(live.redis.eval, scripts.load("pull"), 3, *keys, *args)
        wait_for(take, what="the request in the queue")
        os.killpg(worker.pid, signal.SIGCONT)

        def is_known() -> bool:
            return live.heartbeat(name).waiting == len(calls) - 1  # type: ignore[union-attr]

        wait_for(is_known, timeout_s=8, what="taking it up")
        assert scene.pending(name) == len(calls), "while all others still ran"
        assert worker.stop() == 0
        with restarted(live, name):
            for call in calls:
                assert call.wait().error is None, call.error
    finally:
        worker.end()
        live.forget_worker(name)


async def test_a_drain_waits_for_what_was_just_pulled(scene: Scene) -> None:
    live, name = scene.live, "drained-early"
    proxy = FaultProxy(choose_ports(1)[0], urlsplit(live.redis_url).port or 0)
    listener = await proxy.start()
    through = proxy.way_to(live.redis_url)
    start = functools.partial(live.start_worker, name, step_s=STEP_S, REDIS_URL=through)
    worker = await asyncio.to_thread(start)
    try:
        proxy.delay_s = 1.0
        call = Call(stream=False).start(scene.url, live.tenants["acme"].key)
        while not scene.pending(name):
            await asyncio.sleep(0.01)
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(call.wait)
        assert call.error is None, call.error
        usage = await asyncio.to_thread(scene.usage, call)
        assert usage["completion_tokens"] == TOKENS
        began = time.monotonic()
        while worker.exit_code is None and time.monotonic() < began + 20:
            await asyncio.sleep(0.05)
        assert worker.exit_code == 0
        assert live.heartbeat(name) is None
    finally:
        worker.end()
        listener.close()
        proxy.cut()
        live.forget_worker(name)
