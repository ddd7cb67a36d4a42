"""Reading that hangs for good: it costs the requests that need those files, and nobody else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine import AdapterUnavailable, Engine, FinishReason, OutOfPages
from engine.adapters.loader import _MAX_HUNG
from engine.request import Priority
from engine.stats import AdapterStatus
from tests.engine.adapters.test_tiers import copy_of
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run

PAGE_BYTES = 2048 * 4
TIMEOUT_S = 30.0


class Disk:
    """Reading from some folders hangs until `let_go`; the clock is moved by hand."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self.now = 100.0
        self._make_engine = make_engine
        self._is_fine = threading.Event()
        self.hanging: set[Path] = set()
        self.num_read = 0
        self.engine: Engine

    def start(self, **config: Any) -> Engine:
        self.engine = self._make_engine(clock=lambda: self.now, load_timeout_s=TIMEOUT_S, **config)
        reader: Any = self.engine._store._loader._reader
        load: Callable[..., None] = reader.load

        def held_up(digest: str, path: Path, room: Any) -> None:
            self.num_read += 1
            if path in self.hanging:
                self._is_fine.wait()
            load(digest, path, room)

        reader.load = held_up
        return self.engine

    def hang(self, digest: str, path: Path) -> None:
        """Register an adapter that cannot be read, and give up reading it."""
        self.hanging.add(path)
        self.engine.register_adapter(digest, path)
        self.engine.add(request(digest, prompt(0, 5), adapter=digest, max_tokens=2))
        assert not self.engine.step()
        self.now += TIMEOUT_S + 1
        [output] = self.engine.step()
        assert isinstance(output.error, AdapterUnavailable)
        self.engine.check_integrity()

    def let_go(self) -> None:
        self._is_fine.set()
        while self.engine._store._loader._hung:
            self.engine._store.poll(())


@pytest.fixture
def disk(make_engine: MakeEngine) -> Iterator[Disk]:
    disk = Disk(make_engine)
    yield disk
    disk.let_go()


def test_a_file_whose_reading_hangs_is_not_read_twice(
    disk: Disk, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    engine = disk.start()
    disk.hang("hanging", copy_of(adapters["all-4"], tmp_path / "hanging"))
    for i in range(3):
        disk.now += 100  # past every pause
        again = request(f"again-{i}", prompt(0, 5), adapter="hanging", max_tokens=2)
        error = run(engine, again, max_steps=3, check=True)[f"again-{i}"].error
        assert isinstance(error, AdapterUnavailable)
    assert disk.num_read == 1
    disk.let_go()
    disk.now += 100
    got = run(engine, request("r", prompt(0, 5), adapter="hanging", max_tokens=6))
    assert got["r"].token_ids == oracle.generate(prompt(0, 5), 6, "all-4")


def test_nothing_is_read_while_too_many_threads_hang_and_nobody_waits_for_it(
    disk: Disk, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    engine = disk.start()
    for i in range(_MAX_HUNG):
        disk.hang(f"hanging-{i}", copy_of(adapters["ko-1"], tmp_path / str(i)))
    requests = [
        request("adapter", prompt(0, 5), adapter="qv-16", max_tokens=6),
        request("base", prompt(0, 5), max_tokens=6),
    ]
    engine.prefetch("mlp-rs")
    got = run(engine, *requests, max_steps=20, check=True)
    assert isinstance(got["adapter"].error, AdapterUnavailable)
    assert got["base"].token_ids == oracle.generate(prompt(0, 5), 6)
    disk.let_go()
    disk.now += 100
    got = run(engine, request("r", prompt(0, 5), adapter="qv-16", max_tokens=6))
    assert got["r"].token_ids == oracle.generate(prompt(0, 5), 6, "qv-16")


def test_host_memory_that_hanging_threads_hold_is_done_without(
    disk: Disk, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """Adapters that it had room for get memory of their own, as those larger than all of it."""
    engine = disk.start(host_cache_bytes=5 * PAGE_BYTES)
    disk.hang("hanging", copy_of(adapters["all-4"], tmp_path / "hanging"))
    engine.prefetch("qv-16")
    for name in ("mlp-rs", "all-4", "qv-16"):
        got = run(engine, request(name, prompt(0, 5), adapter=name, max_tokens=6), check=True)
        assert got[name].token_ids == oracle.generate(prompt(0, 5), 6, name)
    host = engine._store._loader._host
    assert host.num_pages < 5
    disk.let_go()
    assert host.num_pages == 5


def test_what_lies_beside_host_memory_makes_no_room_in_it(
    disk: Disk, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """All of it is a thread's that hangs; a larger packed adapter waits for room in the arena."""
    engine = disk.start(arena_bytes=70 * PAGE_BYTES, host_cache_bytes=PAGE_BYTES, loader_threads=2)
    engine.add(request("long", prompt(1, 220), max_tokens=90))
    engine.step()
    large = request("large", prompt(0, 5), adapter="all-64", max_tokens=2, priority=Priority.BATCH)
    engine.add(large)
    while engine.adapter_status("all-64") != AdapterStatus("host"):
        engine.step()
    disk.hanging.add(folder := copy_of(adapters["ko-1"], tmp_path / "hanging"))
    engine.register_adapter("hanging", folder)
    for name in ("hanging", "ko-1"):
        engine.add(request(name, prompt(0, 5), adapter=name, max_tokens=2))
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    disk.let_go()
    assert run(engine, check=True)["ko-1"].error is None


def test_memory_beside_host_memory_is_not_kept_for_nobody(disk: Disk) -> None:
    """Whether its request is cancelled before or after it has been read."""
    engine = disk.start(arena_bytes=70 * PAGE_BYTES, host_cache_bytes=0)
    engine.add(request("long", prompt(1, 220), max_tokens=90))
    engine.step()
    for is_read in (False, True):
        engine.add(request("large", prompt(0, 5), adapter="all-64", max_tokens=2))
        engine.step()
        while is_read and engine.adapter_status("all-64") != AdapterStatus("host"):
            engine.step()
        engine.cancel("large")
        engine.step()
        while engine.adapter_status("all-64") == AdapterStatus("loading"):
            engine.step()
        assert engine.adapter_status("all-64") == AdapterStatus("disk")
        engine.check_integrity()


def test_who_outgrows_the_arena_ends_though_something_is_read(
    disk: Disk, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """What is read takes no room in the arena: nobody need wait for the end of it."""
    engine = disk.start(arena_bytes=70 * PAGE_BYTES, min_adapter_bytes=66 * PAGE_BYTES)
    disk.hanging.add(folder := copy_of(adapters["ko-1"], tmp_path / "hanging"))
    engine.register_adapter("hanging", folder)
    engine.prefetch("hanging")
    engine.add(request("large", prompt(0, 40), max_tokens=60))
    engine.add(request("small", prompt(1, 5), max_tokens=6))
    ends = {}
    for _ in range(60):
        ends |= {o.request_id: o for o in engine.step() if o.finish_reason}
    assert isinstance(ends["large"].error, OutOfPages)
    assert ends["small"].finish_reason == FinishReason.LENGTH
    assert engine.adapter_status("hanging") == AdapterStatus("loading")


def test_an_adapter_that_comes_back_is_read_where_it_is_now(
    disk: Disk, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """It was unregistered, and its folder deleted, while a request ran with it."""
    engine = disk.start(host_cache_bytes=0, arena_bytes=70 * PAGE_BYTES)
    folder = copy_of(adapters["qv-16"], tmp_path / "before")
    engine.register_adapter("moving", folder)
    engine.add(request("r", prompt(0, 5), adapter="moving", max_tokens=60))
    while engine.adapter_status("moving") != AdapterStatus("resident"):
        engine.step()
    engine.unregister_adapter("moving")
    shutil.rmtree(folder)
    engine.register_adapter("moving", adapters["qv-16"])
    run(engine)
    engine._store.evict_idle(engine.stats().num_pages, keep=())
    assert engine.adapter_status("moving") == AdapterStatus("disk")
    got = run(engine, request("again", prompt(0, 5), adapter="moving", max_tokens=6))["again"]
    assert got.token_ids == oracle.generate(prompt(0, 5), 6, "qv-16")


@pytest.mark.parametrize("is_read", [False, True], ids=["reading", "copying"])
def test_a_process_without_threads_to_spare_fails_what_needs_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, oracle: Oracle, is_read: bool
) -> None:
    engine = disk.start()
    if is_read:
        engine.prefetch("qv-16")
        run(engine)
    with monkeypatch.context() as context:
        no_thread = RuntimeError("can't start new thread")
        context.setattr(threading.Thread, "start", Mock(side_effect=no_thread))
        asked = [request("r", prompt(0, 5), adapter="qv-16"), request("s", [1, 2], max_tokens=2)]
        got = run(engine, *asked, check=True)
    assert isinstance(got["r"].error, AdapterUnavailable)
    assert got["s"].finish_reason == FinishReason.LENGTH
    disk.now += 1
    again = run(engine, request("again", prompt(0, 5), adapter="qv-16", max_tokens=6))["again"]
    assert again.token_ids == oracle.generate(prompt(0, 5), 6, "qv-16")
