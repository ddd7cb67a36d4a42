"""An adapter's life between disk, host memory and pages: slow, broken, crowded out, back again."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import (
    AdapterDamaged,
    AdapterMismatch,
    AdapterUnavailable,
    Engine,
    EngineConfig,
    FinishReason,
    OutOfPages,
    UnknownAdapter,
)
from engine.stats import AdapterStatus
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PAGE_BYTES = 2048 * 4
EVERYTHING = ("all-4", "qv-16", "patterns", "ko-1", "mlp-rs")


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def step_until(engine: Engine, is_done: Callable[[], bool], results: dict[str, Result]) -> float:
    """Step, collecting outputs, for 20 seconds at most; the seconds of the slowest step."""
    end, slowest = time.monotonic() + 20, 0.0
    while not is_done():
        started = time.monotonic()
        assert started < end, f"nothing came of it: {engine.stats()}"
        outputs = engine.step()
        slowest = max(slowest, time.monotonic() - started)
        for output in outputs:
            results.setdefault(output.request_id, Result()).add(output)
        engine.check_integrity()
    return slowest


def has_ended(results: dict[str, Result], *request_ids: str) -> Callable[[], bool]:
    return lambda: all(
        request_id in results and results[request_id].finish_reason for request_id in request_ids
    )


class HangingDisk:
    """An adapter whose tensors cannot be opened until the pipe in their place has a writer."""

    def __init__(self, engine: Engine, source: Path, folder: Path) -> None:
        self._file = copy_of(source, folder) / TENSORS
        self._source, self._engine = source / TENSORS, engine
        engine.register_adapter("hanging", folder)
        self._file.unlink()
        os.mkfifo(self._file)

    def let_go(self) -> None:
        """Who waits for the file finds it empty; waits until somebody does."""
        end = time.monotonic() + 20
        while True:
            try:
                os.close(os.open(self._file, os.O_WRONLY | os.O_NONBLOCK))
                return
            except OSError as error:  # nobody has opened it yet
                assert error.errno == errno.ENXIO and time.monotonic() < end
                time.sleep(0.01)

    def mend(self) -> None:
        """The file is there again, and the thread that hung has ended."""
        self._file.unlink()
        shutil.copyfile(self._source, self._file)
        while self._engine._store._loader._hung:
            self._engine._store.poll(())


def test_a_disk_that_hangs_stops_nobody_else(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    now = [100.0]
    engine = make_engine(clock=lambda: now[0], loader_threads=2, load_timeout_s=30.0)
    disk = HangingDisk(engine, adapters["all-4"], tmp_path / "hanging")
    results: dict[str, Result] = {}
    engine.add(request("hanging", prompt(0, 5), adapter="hanging", max_tokens=6))
    for name in ("all-64", "qv-16"):
        engine.add(request(name, prompt(0, 5), adapter=name, max_tokens=6))
    engine.add(request("base", prompt(0, 5), max_tokens=6))
    slowest = step_until(engine, has_ended(results, "all-64", "qv-16", "base"), results)
    assert slowest < 5  # a step that waited for the thread would never have returned
    for name in ("all-64", "qv-16"):
        assert results[name].token_ids == oracle.generate(prompt(0, 5), 6, name)
    assert "hanging" not in results
    now[0] += 31
    step_until(engine, has_ended(results, "hanging"), results)
    assert isinstance(results["hanging"].error, AdapterUnavailable)
    assert "30 s" in results["hanging"].error.message
    disk.let_go()
    disk.mend()
    now[0] += 10
    again = run(engine, request("again", prompt(0, 5), adapter="hanging", max_tokens=6))
    assert again["again"].token_ids == oracle.generate(prompt(0, 5), 6, "all-4")


def test_a_thread_that_hangs_is_replaced(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """With one thread all others wait for it, but not longer than the timeout."""
    now = [100.0]
    engine = make_engine(clock=lambda: now[0], loader_threads=1, load_timeout_s=30.0)
    disk = HangingDisk(engine, adapters["all-4"], tmp_path / "hanging")
    results: dict[str, Result] = {}
    engine.add(request("hanging", prompt(0, 5), adapter="hanging", max_tokens=6))
    engine.step()
    engine.add(request("next", prompt(0, 5), adapter="qv-16", max_tokens=6))
    for _ in range(20):
        assert not engine.step()
    now[0] += 31
    step_until(engine, has_ended(results, "hanging", "next"), results)
    assert isinstance(results["hanging"].error, AdapterUnavailable)
    assert results["next"].token_ids == oracle.generate(prompt(0, 5), 6, "qv-16")
    disk.let_go()


def test_closing_does_not_wait_for_a_disk_that_hangs(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20))
    disk = HangingDisk(engine, adapters["all-4"], tmp_path / "hanging")
    engine.add(request("r", [1, 2], adapter="hanging"))
    engine.step()
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 15
    disk.let_go()


class Flaky:
    """An engine with an adapter whose config comes and goes, on a clock that is moved by hand."""

    def __init__(self, make_engine: MakeEngine, source: Path, folder: Path) -> None:
        self.now = 100.0
        self.engine = make_engine(clock=lambda: self.now)
        self.folder, self._source, self._count = copy_of(source, folder), source, 0
        self.engine.register_adapter("flaky", folder)

    def take_away(self) -> None:
        (self.folder / CONFIG).unlink()

    def bring_back(self) -> None:
        shutil.copyfile(self._source / CONFIG, self.folder / CONFIG)

    def works(self) -> bool:
        self._count += 1
        name = str(self._count)
        got = run(self.engine, request(name, [1, 2], adapter="flaky", max_tokens=2), check=True)
        if got[name].finish_reason == FinishReason.LENGTH:
            return True
        assert isinstance(got[name].error, AdapterUnavailable)
        return False


@pytest.fixture
def flaky(make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path) -> Flaky:
    return Flaky(make_engine, adapters["all-4"], tmp_path / "flaky")


def test_a_failed_load_is_tried_again_after_a_pause(flaky: Flaky) -> None:
    flaky.take_away()
    assert not flaky.works()
    flaky.bring_back()
    flaky.now += 0.4
    assert not flaky.works()  # the disk is not asked
    flaky.now += 0.2
    assert flaky.works()


def test_the_pause_doubles_up_to_a_minute(flaky: Flaky) -> None:
    """Each attempt is made when its pause is over, and not a moment before."""
    flaky.take_away()
    for pause in (0.5, 1, 2, 4, 8, 16, 32, 60, 60):
        assert not flaky.works()
        flaky.now += pause - 0.01
        flaky.bring_back()
        assert not flaky.works()
        flaky.take_away()
        flaky.now += 0.02
    flaky.bring_back()
    assert flaky.works()
    flaky.take_away()  # in memory: nobody needs the file


def test_registering_again_makes_the_next_attempt_at_once(
    flaky: Flaky, adapters: dict[str, Path], tmp_path: Path
) -> None:
    flaky.take_away()
    assert not flaky.works()
    elsewhere = copy_of(adapters["all-4"], tmp_path / "elsewhere")
    flaky.engine.register_adapter("flaky", elsewhere)
    assert flaky.works()


def digest_of(config_text: bytes, tensors_sha256: str) -> str:
    return hashlib.sha256(config_text + tensors_sha256.encode()).hexdigest()


def digest_in(folder: Path) -> str:
    tensors = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    return digest_of((folder / CONFIG).read_bytes(), tensors)


@pytest.mark.parametrize("kind", ["tensor", "config", "metadata"])
def test_bytes_that_are_not_the_digests_are_refused(
    tiny_model: Path, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path, kind: str
) -> None:
    """One bit of a weight, a field that matters, one that does not: nothing computes with it."""
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20), digest_of=digest_of)
    bad, good = copy_of(adapters["all-4"], tmp_path / "bad"), adapters["qv-16"]
    names = {digest_in(bad): bad, digest_in(good): good}
    for digest, path in names.items():
        engine.register_adapter(digest, path)
    content = bytearray((bad / TENSORS).read_bytes())
    if kind == "tensor":
        content[-1000] ^= 1
        (bad / TENSORS).write_bytes(content)
    else:
        text = (bad / CONFIG).read_text()
        changed = text.replace('"lora_alpha": 8', '"lora_alpha": 9') if kind == "config" else text
        (bad / CONFIG).write_text(changed + (" " if kind == "metadata" else ""))
    results = run(
        engine,
        *(request(d, prompt(0, 5), adapter=d, max_tokens=4) for d in names),
        request("base", prompt(0, 5), max_tokens=4),
        check=True,
    )
    bad_digest, good_digest = names
    assert isinstance(results[bad_digest].error, AdapterDamaged)
    assert results[bad_digest].error.code == "adapter_unavailable"
    assert results[good_digest].token_ids == oracle.generate(prompt(0, 5), 4, "qv-16")
    assert len(results["base"].token_ids) == 4
    engine.close()


def test_weights_that_changed_under_a_name_are_refused(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    """Without a rule for digests: the KV of those before may still be found."""
    engine = make_engine(host_cache_bytes=0)
    folder = copy_of(adapters["all-4"], tmp_path / "edited")
    engine.register_adapter("edited", folder)
    tokens = prompt(0, 40)
    asked = request("r", tokens, adapter="edited", max_tokens=4)
    assert run(engine, asked)["r"].token_ids == oracle.generate(tokens, 4, "all-4")
    engine._store.evict_idle(engine.stats().num_pages, keep=())
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1000] ^= 1
    (folder / TENSORS).write_bytes(content)
    got = run(engine, asked, check=True)["r"]
    assert isinstance(got.error, AdapterDamaged) and "register it again" in got.error.message
    engine.unregister_adapter("edited")
    shutil.rmtree(folder)
    engine.register_adapter("edited", copy_of(adapters["qv-16"], folder))
    assert run(engine, asked)["r"].token_ids == oracle.generate(tokens, 4, "qv-16")


def test_damage_is_told_before_what_it_led_to(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20), digest_of=digest_of)
    folder = copy_of(adapters["all-4"], tmp_path / "bad")
    digest = digest_in(folder)
    engine.register_adapter(digest, folder)
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[:-400] + b"\xff" * 400)  # NaN
    got = run(engine, request("r", [1, 2], adapter=digest))["r"]
    assert isinstance(got.error, AdapterDamaged)
    engine.register_adapter(digest_in(folder), folder)
    got = run(engine, request("s", [1, 2], adapter=digest_in(folder)))["s"]
    assert isinstance(got.error, AdapterMismatch) and "finite" in got.error.message
    engine.close()


def test_an_adapter_of_another_size_is_refused_when_it_is_read(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine()
    folder = copy_of(adapters["all-4"], tmp_path / "changing")
    engine.register_adapter("changing", folder)
    for name in (CONFIG, TENSORS):
        shutil.copyfile(adapters["all-64"] / name, folder / name)
    got = run(engine, request("r", [1, 2], adapter="changing"), check=True)["r"]
    assert isinstance(got.error, AdapterDamaged)


# Room


@pytest.fixture
def make_small(tiny_model: Path, adapters: dict[str, Path]) -> Iterator[MakeEngine]:
    """Engines that know only `EVERYTHING`, so that their adapters may have little room."""
    made: list[Engine] = []

    def make(clock: Callable[[], float] | None = None, **config: Any) -> Engine:
        given = {"model_dir": tiny_model, "arena_bytes": 4 << 20, **config}
        engine = Engine(EngineConfig(**given), *([clock] if clock else []))
        for name in EVERYTHING:
            engine.register_adapter(name, adapters[name])
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.check_integrity()
        engine.close()


@pytest.fixture
def num_pages(make_small: MakeEngine) -> dict[str, int]:
    """Of each adapter."""
    store = make_small()._store
    return {name: store.num_pages(name) for name in EVERYTHING}


def serve_all(engine: Engine, oracle: Oracle, max_adapter_pages: int) -> None:
    """A request for each adapter and each pair of neighbours; the limit holds in every step."""
    wanted: dict[str, list[int]] = {}
    for i, name in enumerate(EVERYTHING * 2):
        engine.add(request(str(i), prompt(i, 20), adapter=name, max_tokens=5))
        wanted[str(i)] = oracle.generate(prompt(i, 20), 5, name)
    results: dict[str, Result] = {}

    def step() -> bool:
        assert engine.stats().adapter_pages <= max_adapter_pages
        return has_ended(results, *wanted)()

    step_until(engine, step, results)
    assert {name: result.token_ids for name, result in results.items()} == wanted


@pytest.mark.parametrize("host_cache_bytes", [0, 12 * PAGE_BYTES, 1 << 20])
def test_adapters_stay_within_their_limit(
    make_small: MakeEngine, oracle: Oracle, num_pages: dict[str, int], host_cache_bytes: int
) -> None:
    limit = max(num_pages.values())
    engine = make_small(
        max_adapter_bytes=limit * PAGE_BYTES, host_cache_bytes=host_cache_bytes, max_prefetch=2
    )
    serve_all(engine, oracle, limit)
    with pytest.raises(OutOfPages) as raised:
        engine.add(request("all", [1], adapter=dict.fromkeys(EVERYTHING, 1.0)))
    assert raised.value.param == "adapters"


def test_a_blend_fits_wherever_others_have_left_its_parts(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    """Three parts that end in shared pages may take a page more than they would alone."""
    parts = ("one", "two", "three")
    asked = request("r", [1], adapter=dict.fromkeys(parts, 1.0), max_tokens=2)
    for num_pages, fits in ((3, False), (4, True)):
        limit = num_pages * PAGE_BYTES
        engine = Engine(
            EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20, max_adapter_bytes=limit)
        )
        for name in parts:
            engine.register_adapter(name, adapters["ko-1"])
        if fits:
            assert run(engine, asked, check=True)["r"].error is None
        else:
            with pytest.raises(OutOfPages, match="adapters need 4 pages; there are 3"):
                engine.add(asked)
        engine.close()


def test_adapters_leave_kv_its_floor(
    make_small: MakeEngine, oracle: Oracle, num_pages: dict[str, int]
) -> None:
    most = max(num_pages.values())
    engine = make_small(
        arena_bytes=(most + 30) * PAGE_BYTES, min_kv_bytes=30 * PAGE_BYTES, host_cache_bytes=0
    )
    serve_all(engine, oracle, most)


def test_kv_leaves_adapters_their_floor(
    make_small: MakeEngine, oracle: Oracle, num_pages: dict[str, int]
) -> None:
    """Prompts that would fill the arena, and an adapter that comes in all the same."""
    floor = max(num_pages.values())
    engine = make_small(
        arena_bytes=(floor + 12) * PAGE_BYTES,
        min_adapter_bytes=floor * PAGE_BYTES,
        max_running=16,
    )
    for i in range(8):
        engine.add(request(f"long-{i}", prompt(i, 40), max_tokens=60))
    engine.add(request("adapted", prompt(0, 9), adapter="qv-16", max_tokens=5))
    results: dict[str, Result] = {}

    def step() -> bool:
        stats = engine.stats()
        assert stats.kv_pages + stats.cached_pages <= 12
        return has_ended(results, "adapted", *(f"long-{i}" for i in range(8)))()

    step_until(engine, step, results)
    assert results["adapted"].token_ids == oracle.generate(prompt(0, 9), 5, "qv-16")
    for i in range(8):
        assert results[f"long-{i}"].token_ids == oracle.generate(prompt(i, 40), 60)


def test_floors_that_leave_nothing_are_refused(tiny_model: Path) -> None:
    for changes in ({"min_adapter_bytes": 1 << 20}, {"min_kv_bytes": (1 << 20) + 1}):
        config: dict[str, Any] = {"model_dir": tiny_model, "arena_bytes": 1 << 20, **changes}
        with pytest.raises(ValueError, match=next(iter(changes))):
            Engine(EngineConfig(**config))


@pytest.mark.parametrize("size", ["one", "none"])
def test_a_blend_whose_parts_do_not_fit_into_host_memory_together(
    make_small: MakeEngine, oracle: Oracle, num_pages: dict[str, int], size: str
) -> None:
    """The first part's packed adapter gives way once it is in the arena."""
    most = max(num_pages["all-4"], num_pages["qv-16"])
    engine = make_small(host_cache_bytes=most * PAGE_BYTES if size == "one" else 0)
    oracle.blend("crowded", {"all-4": 0.5, "qv-16": 0.5})
    results: dict[str, Result] = {}
    blend = {"all-4": 0.5, "qv-16": 0.5}
    engine.add(request("r", prompt(0, 9), adapter=blend, max_tokens=5))
    step_until(engine, has_ended(results, "r"), results)
    assert results["r"].token_ids == oracle.generate(prompt(0, 9), 5, "crowded")


def test_the_most_urgent_adapters_are_brought_in_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1, max_prefetch=2, loader_threads=4)
    engine.add(request("busy", prompt(0, 5), max_tokens=200))
    for name in EVERYTHING:
        engine.add(request(name, prompt(0, 5), adapter=name, max_tokens=1))
    for _ in range(60):
        engine.step()
        time.sleep(0.002)
        # Whatever is missing of the two most urgent is on its way; the others are not looked at.
        assert set(engine._store._loader._loading) <= {
            engine._store._adapters[name] for name in EVERYTHING
        }
        assert len(engine._store._loader._loading) + len(engine._store._arriving) <= 2
    assert set(engine.stats().resident_digests) >= set(EVERYTHING[:2])


# Ahead of requests


def test_what_is_loaded_ahead_needs_its_file_no_more(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    engine = make_engine()
    folder = copy_of(adapters["all-4"], tmp_path / "a")
    engine.register_adapter("a", folder)
    engine.prefetch("a")
    assert engine.has_work() and engine.adapter_status("a") == AdapterStatus("loading")
    run(engine, check=True)
    assert engine.adapter_status("a") == AdapterStatus("host")
    assert engine.stats().adapter_pages == 0
    shutil.rmtree(folder)
    engine.prefetch("a")
    assert not engine.has_work()
    got = run(engine, request("r", prompt(0, 5), adapter="a", max_tokens=6), check=True)["r"]
    assert got.token_ids == oracle.generate(prompt(0, 5), 6, "all-4")
    assert engine.adapter_status("a") == AdapterStatus("resident")
    assert engine.adapter_status("nobody") is None
    with pytest.raises(UnknownAdapter):
        engine.prefetch("nobody")


@pytest.mark.parametrize("loader_threads", [2, 3])
def test_prefetching_leaves_requests_a_thread(
    make_engine: MakeEngine,
    adapters: dict[str, Path],
    oracle: Oracle,
    tmp_path: Path,
    loader_threads: int,
) -> None:
    now = [100.0]
    engine = make_engine(clock=lambda: now[0], loader_threads=loader_threads, load_timeout_s=30.0)
    disk = HangingDisk(engine, adapters["all-4"], tmp_path / "hanging")
    for name in ("hanging", "ko-1"):
        engine.prefetch(name)
    results: dict[str, Result] = {}
    for name in ("all-64", "qv-16"):
        engine.add(request(name, prompt(0, 5), adapter=name, max_tokens=6))
    slowest = step_until(engine, has_ended(results, "all-64", "qv-16"), results)
    assert slowest < 5
    for name in ("all-64", "qv-16"):
        assert results[name].token_ids == oracle.generate(prompt(0, 5), 6, name)
    assert engine.adapter_status("hanging") == AdapterStatus("loading")
    now[0] += 31
    step_until(engine, lambda: not engine.has_work(), results)
    status = engine.adapter_status("hanging")
    assert status is not None and isinstance(status.failure, AdapterUnavailable)
    assert engine.adapter_status("ko-1") == AdapterStatus("host")
    disk.let_go()
    disk.mend()
    now[0] += 10
    again = run(engine, request("again", prompt(0, 5), adapter="hanging", max_tokens=6))
    assert again["again"].token_ids == oracle.generate(prompt(0, 5), 6, "all-4")
    assert engine.adapter_status("hanging") == AdapterStatus("resident")


def test_prefetching_takes_room_from_nobody_who_needs_it(
    make_small: MakeEngine, oracle: Oracle, num_pages: dict[str, int]
) -> None:
    """Images that were never used stay for the first request, but make room for one."""
    first, *others = EVERYTHING
    room = num_pages[first] + max(num_pages[name] for name in others) - 1
    engine = make_small(host_cache_bytes=room * PAGE_BYTES)
    for name in EVERYTHING:
        engine.prefetch(name)
    run(engine, check=True)
    ahead = [name for name in EVERYTHING if engine.adapter_status(name) == AdapterStatus("host")]
    assert ahead[0] == first and sum(num_pages[name] for name in ahead) <= room
    left = next(name for name in others if name not in ahead)
    engine.prefetch(left)
    run(engine, check=True)
    assert engine.adapter_status(left) == AdapterStatus("disk")
    got = run(engine, request("r", prompt(0, 5), adapter=left, max_tokens=6), check=True)["r"]
    assert got.token_ids == oracle.generate(prompt(0, 5), 6, left)


def test_prefetching_may_displace_what_was_used(
    make_small: MakeEngine, num_pages: dict[str, int]
) -> None:
    engine = make_small(host_cache_bytes=max(num_pages.values()) * PAGE_BYTES)
    run(engine, request("r", [1, 2], adapter=EVERYTHING[0], max_tokens=2))
    engine.prefetch(EVERYTHING[2])
    run(engine, check=True)
    assert engine.adapter_status(EVERYTHING[2]) == AdapterStatus("host")
    assert engine.adapter_status(EVERYTHING[0]) == AdapterStatus("resident")


def test_what_is_forgotten_is_not_prefetched(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(loader_threads=1)
    disk = HangingDisk(engine, adapters["all-4"], tmp_path / "hanging")
    for name in ("hanging", "qv-16", "ko-1"):
        engine.prefetch(name)
    engine.step()
    for name in ("hanging", "qv-16"):
        engine.unregister_adapter(name)
    engine.check_integrity()
    disk.let_go()
    run(engine, check=True)
    assert engine.adapter_status("hanging") is None and engine.adapter_status("qv-16") is None
    assert engine.adapter_status("ko-1") == AdapterStatus("host")


def test_what_no_host_memory_could_hold_is_not_prefetched(make_small: MakeEngine) -> None:
    engine = make_small(host_cache_bytes=0)
    engine.prefetch("all-4")
    assert not engine.has_work()
    assert engine.adapter_status("all-4") == AdapterStatus("disk")
