# ruff: noqa: F811  (fixtures)
"""How a worker ends: when it is told to, and when its engine or something of its own fails."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.messages import protocol
from contract.messages.protocol import ErrorCode
from demo.stack import EmbeddedStack
from engine.request import Request, RequestOutput, SamplingParams
from tests.fakes import FAKE_NAME, FakeEngine, fake_config, fake_engine
from tests.live import wait_for
from tests.messages import make_job
from tests.worker.scenes import (  # noqa: F401
    STEP_S,
    TOKENS,
    Scene,
    accountant,
    pool,
    scene,
    web,
)
from tests.worker.serving.test_streams import WORKER, Pool, make_news, take
from tests.worker.serving.test_streams import pool as queue  # noqa: F401
from worker.config import WorkerConfig
from worker.engine_process.channel import StepReport
from worker.engine_process.link import EngineLink
from worker.serving import service
from worker.serving.requests import Requests
from worker.serving.service import Worker
from worker.serving.streams import Dispatch, Streams
from worker.serving.tasks import Tasks


@pytest.fixture
def config(queue: Pool, tmp_path: Path) -> WorkerConfig:
    return fake_config(tmp_path, worker_id=WORKER, pool=queue.name, redis_url=queue.url)


async def test_tasks_end_though_some_cancellations_get_lost(stack: EmbeddedStack) -> None:
    streams = Streams(stack.env["REDIS_URL"], pool="endings", worker_id=WORKER, boot_id="b")
    await streams.prepare()

    async def ask_for_ever() -> None:
        while True:
            await streams.inbox()

    errors: list[BaseException] = []
    for _ in range(10):
        tasks = Tasks(errors.append)
        for _ in range(5):
            tasks.start(ask_for_ever())
        for _ in range(random.randrange(20, 40)):
            await asyncio.sleep(0)
        ending = asyncio.create_task(tasks.end())
        _, running = await asyncio.wait({ending}, timeout=10)
        assert not running
    assert errors == []
    await streams.close()


async def test_the_failure_of_a_task_is_heard_of() -> None:
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)

    async def fail() -> None:
        raise MemoryError

    tasks.start(fail())
    tasks.start(asyncio.sleep(60))
    await asyncio.sleep(0.01)
    assert [type(error) for error in errors] == [MemoryError]
    await tasks.end()
    assert len(errors) == 1, "to be cancelled is no failure"


async def test_a_worker_that_is_told_to_stop_stops(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heart beats without a pause, so that it may be cancelled in the moment of a send."""
    monkeypatch.setattr(service, "HEARTBEAT_INTERVAL_S", 0.0)
    for _ in range(3):
        worker = Worker(config, fake_engine(0.0), lambda *_: None)
        running = asyncio.create_task(worker.run())
        while not worker._is_loaded.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for _ in range(random.randrange(40)):
            await asyncio.sleep(0)
        for _ in range(2):
            worker.drain()
        done, _ = await asyncio.wait({running}, timeout=10)
        assert done, "it never ended"
        assert running.result() == 1


class Junk:
    """Nothing that could be read at the other end of a pipe."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise_memory_error, ()


def _raise_memory_error() -> None:
    raise MemoryError


class JunkEngine(FakeEngine):
    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        outputs[0].token_ids = [Junk()]  # type: ignore[list-item]
        return outputs


class FailingEngine(FakeEngine):
    """Fails while a thread of its own goes on."""

    def step(self) -> list[RequestOutput]:
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise MemoryError


def junk_engine(_: WorkerConfig) -> FakeEngine:
    return JunkEngine()


def failing_engine(_: WorkerConfig) -> FakeEngine:
    return FailingEngine()


@dataclasses.dataclass
class Linked:
    link: EngineLink
    loaded: asyncio.Event
    lost: asyncio.Event


def add(**fields: Any) -> Request:
    given = {"request_id": "r#1.0", "token_ids": [10], "sampling": SamplingParams()}
    return Request(**{**given, **fields})


@pytest.fixture
async def linked(config: WorkerConfig) -> AsyncIterator[Callable[..., Linked]]:
    links: list[EngineLink] = []

    def start(factory: Any) -> Linked:
        found = Linked(EngineLink(config, factory), asyncio.Event(), asyncio.Event())
        links.append(found.link)

        def on_report(_: StepReport) -> None:
            found.loaded.set()

        found.link.start(on_report, found.lost.set)
        return found

    yield start
    for link in links:
        link.stop()


@pytest.mark.parametrize(
    "factory,command",
    [
        (junk_engine, add()),
        (failing_engine, add()),
        (fake_engine(0.0), add(token_ids=threading.Lock())),
    ],
    ids=["report that cannot be read", "engine that fails", "command that cannot be sent"],
)
async def test_the_loss_of_an_engine_is_noticed(
    linked: Callable[..., Linked], factory: Any, command: Request
) -> None:
    found = linked(factory)
    async with asyncio.timeout(20):
        await found.loaded.wait()
    assert not found.lost.is_set()
    found.link.send(command)
    async with asyncio.timeout(5):
        await found.lost.wait()


async def test_an_output_that_cannot_be_taken_in_ends_its_request_alone(
    config: WorkerConfig, streams: Streams
) -> None:
    sent: list[Any] = []
    errors: list[BaseException] = []
    tasks = Tasks(errors.append)
    requests = Requests(config, streams, send=sent.append, fetch=lambda *_: None, tasks=tasks)
    for number in (1, 2):
        job = make_job(request_id=f"r{number}", text="x", base_model=FAKE_NAME)
        requests.take_up(f"{number}-0".encode(), job, Dispatch(state="queued", lease=1, attempt=1))
    while len(requests.in_engine) < 2:
        await asyncio.sleep(0.01)
    bad = RequestOutput(request_id="r1#1.0", token_ids=["no token"])  # type: ignore[list-item]
    requests.on_outputs([bad, RequestOutput(request_id="r2#1.0", token_ids=[65], num_generated=1)])
    assert requests.active == {b"2-0"}
    assert requests.num_tokens == 2
    assert requests.flusher.unsent == {b"1-0"}, "its client is to hear of it"
    await tasks.end()
    assert errors == []


@pytest.fixture
async def streams(queue: Pool) -> AsyncIterator[Streams]:
    made = queue.streams()
    await made.prepare()
    yield made
    await made.close()


async def test_what_the_engine_may_have_died_of_is_counted(queue: Pool, streams: Streams) -> None:
    job = queue.submit()
    for attempt in (1, 2):
        (pulled,) = await streams.pull("b", 1)
        assert pulled.dispatch.attempt == attempt
        await streams.requeue(
            job.request_id, pulled.dispatch.lease, pulled.entry_id, is_suspect=True
        )
        assert queue.inbox_length() == 0
    (pulled,) = await streams.pull("b", 1)
    await streams.requeue(job.request_id, pulled.dispatch.lease, pulled.entry_id)
    assert queue.job_hash()[b"attempt"] == b"2", "it was not in the engine that time"


async def test_a_request_marked_as_poison_is_a_dead_letter(queue: Pool, streams: Streams) -> None:
    queue.submit()
    entry_id, lease = await take(streams)
    await streams.mark_poison("r1", lease - 1)
    assert queue.job_hash()[b"attempt"] == b"1", "by who holds no lease of it"
    for _ in range(2):  # a reply may get lost
        await streams.mark_poison("r1", lease)
    news = make_news(entry_id, lease=lease, ends=True)
    assert await streams.publish(f"g-{queue.name}", [news]) == []
    (letter,) = queue.client.xrange(protocol.dead_letter_key(queue.name))
    assert letter[1][b"reason"] == b"given up"


@pytest.mark.alone
def test_who_waits_for_a_lost_engine_hears_of_it_at_once(
    scene: Scene, request: pytest.FixtureRequest
) -> None:
    """Sooner than a worker's silence would tell: what nobody has seen goes to another."""
    live = scene.live
    first = live.start_worker("doomed", step_s=5 * STEP_S)
    try:
        streamed, whole = scene.calls(streamed=1, whole=1)
        wait_for(lambda: scene.pending("doomed") == 2, what="taking up")
        second = live.start_worker("heir", step_s=STEP_S)
        try:
            began = time.monotonic()
            (engine,) = (
                child
                for child in psutil.Process(first.pid).children()
                if "spawn_main" in " ".join(child.cmdline())
            )
            os.kill(engine.pid, signal.SIGKILL)
            assert getattr(streamed.wait().error, "code", None) == ErrorCode.WORKER_LOST
            assert time.monotonic() - began < protocol.HEARTBEAT_TIMEOUT_S / 2
            assert 0 < scene.usage(streamed)["completion_tokens"] < TOKENS
            assert whole.wait().error is None, whole.error
            assert time.monotonic() - began < protocol.HEARTBEAT_TIMEOUT_S
            assert scene.usage(whole)["completion_tokens"] == TOKENS
            assert wait_for(lambda: first.exit_code, what="the worker's end") == 1
            assert live.heartbeat("doomed") is None, "it has said that it is gone"
            assert scene.pending("doomed") == 0
        finally:
            second.end()
    finally:
        first.end()
        live.forget_worker("doomed")
        live.forget_worker("heir")
