"""What the tests of faults share: requests under way on threads of their own, and their scene."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.fakes import FAKE_NAME
from tests.live import LiveStack, Process

STEP_S = 0.02
TOKENS = 80  # of a request: about two seconds


@dataclasses.dataclass
class Call:
    """One request on a thread of its own, and what became of it."""

    stream: bool
    seed: int | None = None
    text: str = ""
    error: Exception | None = None
    request_id: str = ""
    first: threading.Event = dataclasses.field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def start(self, url: str, key: str) -> Call:
        self.thread = threading.Thread(target=self._run, args=(url, key), daemon=True)
        self.thread.start()
        return self

    def _run(self, url: str, key: str) -> None:
        client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
        options: Any = {
            "model": FAKE_NAME,
            "messages": [{"role": "user", "content": "go on and on"}],
            "max_tokens": TOKENS,
            "seed": self.seed,
            "extra_body": {"ignore_eos": True},
        }
        try:
            if self.stream:
                self._read(client.chat.completions.create(stream=True, **options))
            else:
                answer = client.chat.completions.create(**options)
                self.request_id = answer.id.replace("chatcmpl-", "req_")
                self.text = answer.choices[0].message.content or ""
        except Exception as error:
            self.error = error

    def _read(self, stream: Any) -> None:
        for chunk in stream:
            self.request_id = chunk.id.replace("chatcmpl-", "req_")
            if chunk.choices and chunk.choices[0].delta.content:
                self.text += chunk.choices[0].delta.content
                self.first.set()

    def wait(self) -> Call:
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive(), "the request never ended"
        return self


@dataclasses.dataclass
class Scene:
    live: LiveStack
    url: str
    web: Process

    def calls(self, *, streamed: int, whole: int = 0) -> list[Call]:
        """Requests under way, each streamed one past its first token."""
        key = self.live.tenants["acme"].key
        calls = [Call(stream=True).start(self.url, key) for _ in range(streamed)]
        calls += [Call(stream=False).start(self.url, key) for _ in range(whole)]
        for call in calls[:streamed]:
            assert call.first.wait(20)
        return calls

    def usage(self, call: Call) -> dict[str, Any]:
        return self.live.usage_row(call.request_id)

    def pending(self, worker_id: str) -> int:
        return int(self.live.redis.xlen(f"in:{{{self.live.pool}}}:{worker_id}"))


@pytest.fixture(scope="module")
def pool(live: LiveStack) -> LiveStack:
    return live.with_pool("faults")


@pytest.fixture(scope="module")
def accountant(pool: LiveStack) -> Iterator[Process]:
    process = pool.start_accountant()
    yield process
    process.end()


@pytest.fixture(scope="module")
def web(pool: LiveStack) -> Iterator[tuple[Process, str]]:
    started = pool.start_web()
    yield started
    started[0].end()


@pytest.fixture
def scene(pool: LiveStack, web: tuple[Process, str], accountant: Process) -> Scene:
    return Scene(pool, web[1], web[0])


@pytest.fixture
def worker(pool: LiveStack, request: pytest.FixtureRequest) -> Iterator[Process]:
    """A worker of this test's own, named after it."""
    process = pool.start_worker(worker_id(request), step_s=STEP_S)
    yield process
    process.end()
    pool.forget_worker(worker_id(request))


def worker_id(request: pytest.FixtureRequest) -> str:
    return request.node.name[-40:]


@contextlib.contextmanager
def restarted(pool: LiveStack, name: str) -> Iterator[Process]:
    process = pool.start_worker(name, step_s=STEP_S)
    try:
        yield process
    finally:
        process.end()
