"""One running platform for all conformance tests: what clients of other servers bring is driven
against it, unmodified.

Two workers serve it: one whose engine echoes the last message (`FAKE_NAME`), for what must come
out exactly, and a real engine with a tiny random model (`ROOMY_NAME`), for grammars and sampling.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.live import LiveStack
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME, write_tiny_base

POOL = "conformance"


@dataclasses.dataclass(frozen=True)
class Served:
    """The address, and clients of it; `live` looks behind it."""

    live: LiveStack
    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def key(self, tenant: str = "acme") -> str:
        return self.live.tenants[tenant].key

    def client(self, tenant: str = "acme", **options: Any) -> OpenAI:
        options = {"api_key": self.key(tenant), "max_retries": 0, **options}
        return OpenAI(base_url=self.base_url, **options)

    def async_client(self, tenant: str = "acme", **options: Any) -> AsyncOpenAI:
        options = {"api_key": self.key(tenant), "max_retries": 0, **options}
        return AsyncOpenAI(base_url=self.base_url, **options)


@pytest.fixture(scope="package")
def served(live: LiveStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pool = live.with_pool(POOL)
    base = write_tiny_base(tmp_path_factory.mktemp("roomy"), name=ROOMY_NAME, context=ROOMY_CONTEXT)
    web, url = pool.start_web("conformance-web")
    workers = [
        pool.start_worker("conformance-echo", step_s=0.0, wait=False),
        pool.start_worker(
            "conformance-tiny",
            step_s=None,
            base=base,
            LORIKEET_ARENA_BYTES=str(96 * 2**20),
            LORIKEET_THREADS="1",
        ),
    ]
    accountant = pool.start_accountant("conformance-accountant")
    batches = pool.start_batch_runner("conformance-batches")
    yield Served(pool, url)
    assert web.stop() == -signal.SIGTERM
    for process in (*workers, accountant, batches):
        assert process.stop() == 0, process.log.read_text()


def say(text: str, role: str = "user") -> list[Any]:
    return [{"role": role, "content": text}]
