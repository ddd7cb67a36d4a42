"""Histories with faults: requests while workers, a gateway, Redis and its lines fail, in a fixed
order or, in `make test-long`, in a storm of them.

Whatever happens, every accepted request ends exactly once, has one usage row, its stream has no gap
and no repetition, and nobody gets another's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest

from demo.ports import HOST, choose_ports
from demo.servers import Redis
from demo.stack import EmbeddedStack
from tests.fakes import FAKE_NAME
from tests.live import LiveStack, Process, live_stack, wait_for

log = logging.getLogger(__name__)

STORM_REQUESTS = 6000
STORM_S = 80.0
#: Requests under way at once, for each request in all: they outlast the faults.
SHARE_AT_A_TIME = 0.032
MAX_AT_A_TIME = 64
STEP_S = 0.005
#: No request takes longer than the longest fault and the wait for what repairs it.
LONGEST_S = 120.0


class FaultProxy:
    """Between processes and Redis: cuts every connection, or holds what they say for a while."""

    def __init__(self, port: int, target: int) -> None:
        self.port, self._target = port, target
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s = 0.0
        self.cuts = 0

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, HOST, self.port)

    def way_to(self, url: str) -> str:
        """The same place, with the same password, by way of the proxy."""
        parts = urlsplit(url)
        who, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{who}{at}{HOST}:{self.port}").geturl()

    def cut(self) -> None:
        self.cuts += 1
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        pumps = [
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for end in (writer, back):
            self._writers.discard(end)
            end.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
                await sink.drain()


@dataclasses.dataclass
class Scene:
    live: LiveStack
    server: Redis
    proxy: FaultProxy
    urls: list[str]
    webs: list[Process]
    workers: dict[str, Process]

    def replace(self, name: str) -> None:
        """Kill a worker, and start the next under its name."""
        self.workers[name].end()
        self.workers[name] = self.live.start_worker(name, step_s=STEP_S, wait=False)

    async def pause(self, process: Process, seconds: float) -> None:
        os.killpg(process.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.killpg(process.pid, signal.SIGCONT)

    async def slow_down(self, delay_s: float, seconds: float) -> None:
        self.proxy.delay_s = delay_s
        await asyncio.sleep(seconds)
        self.proxy.delay_s = 0

    async def restart_redis(self, after_s: float) -> None:
        process = self.server.process
        await asyncio.to_thread(process._popen.kill)  # type: ignore[union-attr]
        await asyncio.to_thread(process._popen.wait)  # type: ignore[union-attr]
        await asyncio.sleep(after_s)
        process.start()
        await asyncio.to_thread(process.wait_until, self.server.is_ready, timeout_s=20)


@dataclasses.dataclass
class Outcome:
    request_id: str = ""
    status: int = 0
    words: str = ""
    is_whole: bool = False
    code: str | None = None
    is_broken: bool = False  # the connection was lost


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path / "redis", port=choose_ports(1)[0], run=tmp_path / "run")
    server.prepare()
    server.process.start()
    server.process.wait_until(server.is_ready, timeout_s=20)
    yield server
    server.process.stop()


async def one(scene: Scene, client: httpx.AsyncClient, number: int, outcome: Outcome) -> None:
    """One request of words that nobody else asks for."""
    chance = random.Random(number)
    tenant = ("acme", "globex")[number % 2]
    word = f"n{number:05}"
    text = " ".join([word] * chance.randrange(1, 5))
    body = {
        "model": chance.choice([FAKE_NAME, f"{tenant}-adapter"]),
        "messages": [{"role": "user", "content": text}],
        "stream": number % 3 == 0,
    }
    headers = {"Authorization": f"Bearer {scene.live.tenants[tenant].key}"}
    url = f"{scene.urls[number % len(scene.urls)]}/v1/chat/completions"
    try:
        async with client.stream("POST", url, json=body, headers=headers) as response:
            outcome.status = response.status_code
            outcome.request_id = response.headers.get("x-request-id", "")
            if body["stream"] and response.status_code == 200:
                async for line in response.aiter_lines():
                    _read_line(outcome, line)
            else:
                _read_whole(outcome, json.loads(await response.aread()))
    except (httpx.HTTPError, ValueError):
        outcome.is_broken = True
    assert text.startswith(outcome.words), (text, outcome)
    assert not outcome.is_whole or outcome.words == text, (text, outcome)


def _read_line(outcome: Outcome, line: str) -> None:
    if not line.startswith("data: {"):
        return
    chunk = json.loads(line[6:])
    if "error" in chunk:
        outcome.code = chunk["error"]["code"]
        return
    choice = chunk["choices"][0]
    assert not outcome.is_whole, "a chunk after the end"
    outcome.words += choice["delta"].get("content") or ""
    outcome.is_whole = choice["finish_reason"] == "stop"


def _read_whole(outcome: Outcome, body: dict[str, Any]) -> None:
    if "error" in body:
        outcome.code = body["error"]["code"]
        return
    outcome.words = body["choices"][0]["message"]["content"]
    outcome.is_whole = body["choices"][0]["finish_reason"] == "stop"


async def misfortune(scene: Scene) -> None:
    """What goes wrong, in turn."""
    for name in ("w1", "w2"):
        await asyncio.sleep(2)
        scene.replace(name)
    scene.proxy.cut()
    await asyncio.sleep(1)
    await scene.slow_down(0.05, seconds=1)
    await scene.pause(scene.workers["w3"], 12)  # past its lease: the reaper takes over
    await scene.restart_redis(after_s=0.5)
    await asyncio.sleep(2)
    await scene.pause(scene.webs[1], 1)
    scene.proxy.cut()
    scene.webs[0].kill()
    scene.urls = scene.urls[1:]


async def storm(scene: Scene, seed: int) -> None:
    """Whatever goes wrong, at any moment, again and again."""
    chance = random.Random(seed)
    until = time.monotonic() + STORM_S
    while time.monotonic() < until:
        await asyncio.sleep(chance.choice([0.02, 0.1, 0.5, 1.5]))
        match chance.choice(["cut"] * 3 + ["slow", "redis", "kill", "worker", "web"]):
            case "cut":
                scene.proxy.cut()
            case "slow":
                await scene.slow_down(chance.choice([0.02, 0.1, 0.3]), seconds=0.7)
            case "redis":
                await scene.restart_redis(after_s=chance.choice([0.05, 0.5, 2]))
            case "kill":
                scene.replace(chance.choice(["w1", "w2"]))
            case "worker":
                await scene.pause(scene.workers["w3"], chance.choice([3, 12]))
            case "web":
                await scene.pause(chance.choice(scene.webs), chance.choice([1, 6]))


@contextlib.asynccontextmanager
async def scene_of(live: LiveStack, server: Redis, through: int) -> AsyncIterator[Scene]:
    proxy = FaultProxy(through, server.port)
    listener = await proxy.start()
    webs = [await asyncio.to_thread(live.start_web, f"web{index}") for index in range(2)]
    workers = {}
    for name in ("w1", "w2", "w3"):
        workers[name] = await asyncio.to_thread(live.start_worker, name, step_s=STEP_S)
    await asyncio.to_thread(live.start_accountant)
    yield Scene(live, server, proxy, [url for _, url in webs], [web for web, _ in webs], workers)
    listener.close()
    proxy.cut()


async def play(
    live: LiveStack,
    server: Redis,
    through: int,
    faults_of: Callable[[Scene], Awaitable[None]],
    num_requests: int,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with scene_of(live, server, through) as scene:
        async with httpx.AsyncClient(
            timeout=60, limits=httpx.Limits(max_connections=200)
        ) as client:
            faults = asyncio.ensure_future(faults_of(scene))
            numbers = iter(range(num_requests))

            async def send() -> None:
                for number in numbers:
                    outcome = Outcome()
                    try:
                        async with asyncio.timeout(LONGEST_S):
                            await one(scene, client, number, outcome)
                    except TimeoutError:
                        pytest.fail(f"{outcome} never ended; not done: {unfinished(live)}")
                    outcomes.append(outcome)
                    if not faults.done():  # so that the requests outlast the faults
                        await asyncio.sleep(0.5)

            at_a_time = min(MAX_AT_A_TIME, round(num_requests * SHARE_AT_A_TIME))
            await asyncio.gather(*(send() for _ in range(at_a_time)))
            await faults
        await asyncio.to_thread(settle, live)
    return outcomes


def settle(live: LiveStack) -> None:
    """Wait until nothing is under way."""

    def is_quiet() -> bool:
        states = [
            live.redis.hget(key, "state") for key in live.redis.scan_iter("job:*", count=1000)
        ]
        return (
            all(state == b"done" for state in states)
            and live.redis.xlen(f"done:{{{live.pool}}}") == 0
        )

    wait_for(is_quiet, timeout_s=90, what="the end of everything")


def unfinished(live: LiveStack) -> list[dict[bytes, bytes]]:
    jobs = [live.redis.hgetall(key) for key in job_keys(live)]
    return [job for job in jobs if job.get(b"state") != b"done"]


def job_keys(live: LiveStack) -> list[bytes]:
    return list(live.redis.scan_iter("job:*", count=1000))


def usage(live: LiveStack) -> Counter[str]:
    with psycopg.connect(live.database_url) as connection:
        rows = connection.execute("select request_id from usage_usagerecord").fetchall()
    return Counter(request_id for (request_id,) in rows)


@pytest.mark.parametrize(
    "num_requests", [pytest.param(200), pytest.param(2000, marks=pytest.mark.long)]
)
def test_requests_among_faults(
    stack: EmbeddedStack, redis_server: Redis, tmp_path: Path, num_requests: int
) -> None:
    check_history(stack, redis_server, tmp_path, misfortune, num_requests)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_requests_in_a_storm(
    stack: EmbeddedStack, redis_server: Redis, tmp_path: Path, seed: int
) -> None:
    check_history(stack, redis_server, tmp_path, lambda scene: storm(scene, seed), STORM_REQUESTS)


def check_history(
    stack: EmbeddedStack,
    redis_server: Redis,
    tmp_path: Path,
    faults_of: Callable[[Scene], Awaitable[None]],
    num_requests: int,
) -> None:
    through = choose_ports(1)[0]
    parts = urlsplit(stack.env["REDIS_URL"])
    env = {**stack.env, "REDIS_URL": parts._replace(netloc=f"{HOST}:{redis_server.port}").geturl()}
    started = time.monotonic()
    (tmp_path / "live").mkdir()
    with live_stack(env, tmp_path / "live", database="lorikeet_histories") as live:
        live.env["REDIS_URL"] = f"redis://{HOST}:{through}/5"
        outcomes = asyncio.run(play(live, redis_server, through, faults_of, num_requests))
        jobs = {
            key.rpartition(b":")[2].decode()
            for key in job_keys(live)
            if live.redis.hexists(key, "lease")  # or else it was given up before it came
        }
        rows = usage(live)
        live.run("manage.py", "usage_totals")  # fails when a total is not the sum of its rows
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    log.info(
        "%d requests in %.0f s, %d whole: %s",
        *(len(outcomes), time.monotonic() - started, len(whole)),
        Counter((outcome.status, outcome.code, outcome.is_broken) for outcome in outcomes),
    )
    assert len(outcomes) == num_requests
    assert set(rows.values()) == {1}
    assert set(rows) == jobs, "an accepted request without a row, or a row without a request"
    assert {outcome.request_id for outcome in whole} <= set(rows)
    assert len(whole) > 0.8 * num_requests
    assert all(
        outcome.is_whole or outcome.is_broken or outcome.code is not None for outcome in outcomes
    )
