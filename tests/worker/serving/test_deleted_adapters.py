"""A deleted adapter leaves a worker's disk: at once, after its requests, or at the next start."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

from contract.messages.protocol import AdapterRef, adapter_digest
from contract.queue.deleted_adapters import ADAPTER_AGE_S
from worker.serving.adapter_cache import AdapterCache

CONFIG, TENSORS = {"r": 4}, b"tensors"
DIGEST = adapter_digest(CONFIG, [TENSORS], "0" * 64)
REF = AdapterRef(digest=DIGEST, config_key="c", tensors_key="t", num_bytes=len(TENSORS))


def fetch(ref: AdapterRef, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(TENSORS)


def cache_in(root: Path, evicted: list[str]) -> AdapterCache:
    return AdapterCache(
        root, max_bytes=10**6, base_revision="0" * 64, fetch=fetch, on_evict=evicted.append
    )


def test_it_goes_at_once_when_no_request_uses_it(tmp_path: Path) -> None:
    evicted: list[str] = []
    cache = cache_in(tmp_path, evicted)
    asyncio.run(cache.acquire(REF))
    cache.release(DIGEST)
    assert (tmp_path / DIGEST).exists()
    cache.drop(DIGEST)
    assert (evicted, list(tmp_path.iterdir())) == ([DIGEST], [])
    cache.drop(DIGEST)
    cache.check_integrity()


def test_running_requests_finish_with_it(tmp_path: Path) -> None:
    evicted: list[str] = []
    cache = cache_in(tmp_path, evicted)

    async def use() -> None:
        await cache.acquire(REF)
        await cache.acquire(REF)

    asyncio.run(use())
    cache.drop(DIGEST)
    cache.release(DIGEST)
    assert (tmp_path / DIGEST).exists()
    assert evicted == []
    cache.check_integrity()
    cache.release(DIGEST)
    assert (evicted, list(tmp_path.iterdir())) == ([DIGEST], [])
    cache.check_integrity()


def test_it_goes_when_it_arrives_after_its_request_was_cancelled(tmp_path: Path) -> None:
    evicted: list[str] = []
    may_fetch = threading.Event()

    def slow(ref: AdapterRef, folder: Path) -> None:
        assert may_fetch.wait(10)
        fetch(ref, folder)

    async def cancel() -> None:
        cache = AdapterCache(
            tmp_path, max_bytes=10**6, base_revision="0" * 64, fetch=slow, on_evict=evicted.append
        )
        request = asyncio.create_task(cache.acquire(REF))
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait([request])
        cache.drop(DIGEST)
        cache.check_integrity()
        may_fetch.set()
        while not evicted:
            await asyncio.sleep(0.01)
        cache.check_integrity()

    asyncio.run(asyncio.wait_for(cancel(), 10))
    assert (evicted, list(tmp_path.iterdir())) == ([DIGEST], [])


def test_what_is_too_old_to_know_of_is_dropped_at_the_start(tmp_path: Path) -> None:
    asyncio.run(cache_in(tmp_path, []).acquire(REF))
    cache_in(tmp_path, [])
    assert (tmp_path / DIGEST).exists()
    then = time.time() - ADAPTER_AGE_S - 1
    os.utime(tmp_path / DIGEST, (then, then))
    cache_in(tmp_path, []).check_integrity()
    assert not (tmp_path / DIGEST).exists()
