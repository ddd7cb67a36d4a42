"""The disk cache of adapters, with a fetch from a dictionary instead of the object store."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.adapters.safetensors_header import FILE as TENSORS_FILE
from contract.messages.protocol import AdapterRef, adapter_digest
from worker.serving.adapter_cache import AdapterCache, AdapterFetchError

REVISION = "r" * 64
TENSORS_BYTES = 1000


class Store:
    """What the object store holds; counts the fetches and can hold them up."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[bytes, bytes]] = {}
        self.num_fetches = 0
        self.gate = threading.Event()
        self.gate.set()

    def add(self, name: str) -> AdapterRef:
        config, tensors = {"name": name}, name.encode().ljust(TENSORS_BYTES, b".")
        digest = adapter_digest(config, [tensors], REVISION)
        self.files[digest] = (json.dumps(config, indent=1).encode(), tensors)
        return AdapterRef(digest=digest, config_key="c", tensors_key="t", num_bytes=len(tensors))

    def __call__(self, ref: AdapterRef, folder: Path) -> None:
        self.num_fetches += 1
        self.gate.wait(10)
        if ref.digest not in self.files:
            raise AdapterFetchError("not there")
        config, tensors = self.files[ref.digest]
        (folder / CONFIG_FILE).write_bytes(config)
        (folder / TENSORS_FILE).write_bytes(tensors)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def evicted() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, store: Store, evicted: list[str]) -> Iterator[AdapterCache]:
    made = open_cache(tmp_path, store, evicted)
    yield made
    made.check_integrity()


def open_cache(root: Path, store: Store, evicted: list[str], max_bytes: int = 3500) -> AdapterCache:
    return AdapterCache(
        root, max_bytes=max_bytes, base_revision=REVISION, fetch=store, on_evict=evicted.append
    )


async def use(cache: AdapterCache, ref: AdapterRef) -> Path:
    folder = await cache.acquire(ref)
    cache.release(ref.digest)
    return folder


async def test_requests_that_want_the_same_adapter_share_one_download(
    cache: AdapterCache, store: Store
) -> None:
    ref = store.add("a")
    store.gate.clear()
    waiting = [asyncio.create_task(cache.acquire(ref)) for _ in range(20)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()  # the impatient one must not spoil it for the others
    store.gate.set()
    folders = await asyncio.gather(*waiting[1:])
    assert store.num_fetches == 1
    assert {folder.name for folder in folders} == {ref.digest}
    assert json.loads((folders[0] / CONFIG_FILE).read_bytes()) == {"name": "a"}


async def test_the_oldest_use_goes_first(
    cache: AdapterCache, store: Store, evicted: list[str], tmp_path: Path
) -> None:
    a, b, c, d = (store.add(name) for name in "abcd")
    for ref in (a, b, c, a, d):
        await use(cache, ref)
    assert evicted == [b.digest]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ref.digest for ref in (a, c, d)
    )


async def test_what_is_in_use_stays_whatever_it_costs(
    cache: AdapterCache, store: Store, evicted: list[str]
) -> None:
    refs = [store.add(name) for name in "abcde"]
    for ref in refs:
        await cache.acquire(ref)
    assert evicted == []
    cache.release(refs[3].digest)
    assert evicted == [refs[3].digest]


async def test_tampered_bytes_are_refused_and_not_kept(
    cache: AdapterCache, store: Store, tmp_path: Path
) -> None:
    ref = store.add("a")
    config, tensors = store.files[ref.digest]
    store.files[ref.digest] = (config, tensors[:-1] + b"!")
    with pytest.raises(AdapterFetchError, match="digest"):
        await cache.acquire(ref)
    assert list(tmp_path.iterdir()) == []
    store.files[ref.digest] = (config, tensors)
    await use(cache, ref)  # a failure is not remembered


async def test_what_is_not_there_fails_and_leaves_nothing(
    cache: AdapterCache, store: Store, tmp_path: Path
) -> None:
    ref = store.add("a")
    store.files.clear()
    with pytest.raises(AdapterFetchError):
        await cache.acquire(ref)
    assert list(tmp_path.iterdir()) == []


async def test_a_restart_finds_its_adapters_and_hashes_them_again(
    store: Store, evicted: list[str], tmp_path: Path
) -> None:
    good, bad = store.add("good"), store.add("bad")
    first = open_cache(tmp_path, store, evicted)
    await use(first, good)
    await use(first, bad)
    (tmp_path / bad.digest / TENSORS_FILE).write_bytes(b"rot")
    (tmp_path / "x.part").mkdir()

    second = open_cache(tmp_path, store, evicted)
    await use(second, good)
    assert store.num_fetches == 2
    await use(second, bad)
    assert store.num_fetches == 3
    assert not (tmp_path / "x.part").exists()
    second.check_integrity()


async def test_a_restart_counts_what_it_finds(
    store: Store, evicted: list[str], tmp_path: Path
) -> None:
    first = open_cache(tmp_path, store, evicted)
    for name in "abc":
        await use(first, store.add(name))
    second = open_cache(tmp_path, store, evicted, max_bytes=2500)
    await use(second, store.add("d"))
    assert len(evicted) == 2
    assert len(list(tmp_path.iterdir())) == 2


async def test_what_is_not_an_adapter_is_left_alone(
    store: Store, evicted: list[str], tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_bytes(b"x" * 5000)
    (tmp_path / "file").write_bytes(b"x" * 5000)
    cache = open_cache(tmp_path, store, evicted)
    await use(cache, store.add("a"))
    assert evicted == []
    assert (tmp_path / "notes" / "todo.txt").exists()
