"""How large the arena becomes, and what is said when there is no room for one."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from engine import DashConfig, Engine, EngineConfig, OutOfMemory
from engine.execution.arena import CPU_ARENA_BYTES, arena_pages
from engine.execution.gpu_runner import GpuRunner
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from tests.engine.conftest import prompt, request, run

GIB = 1 << 30


def never(_: torch.Tensor) -> int:
    raise AssertionError("a CPU's arena is not measured")


def test_on_a_cpu_it_is_what_was_asked_for(tiny_model: Path) -> None:
    model = ModelConfig.from_folder(tiny_model)
    config = EngineConfig(model_dir=tiny_model)
    page_bytes = config.page_bytes(model)
    assert arena_pages(config, model, never) == CPU_ARENA_BYTES // page_bytes
    given = EngineConfig(model_dir=tiny_model, arena_bytes=10 * page_bytes + 1)
    assert arena_pages(given, model, never) == 10
    with pytest.raises(ValueError, match="arena_bytes"):
        arena_pages(EngineConfig(model_dir=tiny_model, arena_bytes=page_bytes - 1), model, never)


@pytest.fixture
def half_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says that 2 of 4 GiB are free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(EngineConfig, "is_cpu", False)


@pytest.mark.usefixtures("half_a_card")
def test_on_a_gpu_it_is_what_is_left(tiny_model: Path) -> None:
    config = EngineConfig(model_dir=tiny_model, max_running=4)
    model = ModelConfig.from_folder(tiny_model)
    other_graphs = 100 << 20

    def profile_run(arena: torch.Tensor) -> int:
        assert arena.shape[0] == 1
        return other_graphs

    got = arena_pages(config, model, profile_run) * config.page_bytes(model)
    expected = 2 * GIB - other_graphs - 0.02 * 4 * GIB - 4 * 40 * model.vocab_size
    assert 0 <= expected - got <= config.page_bytes(model)


@pytest.mark.usefixtures("half_a_card")
def test_too_little_is_said(tiny_model: Path) -> None:
    model = ModelConfig.from_folder(tiny_model)
    with pytest.raises(OutOfMemory, match="max_context"):
        arena_pages(EngineConfig(model_dir=tiny_model), model, lambda _: 2 * GIB)


@pytest.mark.usefixtures("half_a_card")
@pytest.mark.parametrize(("reserved_share", "less"), [(0.25, GIB), (0.0, 0)])
def test_what_is_reserved_stays_free(tiny_model: Path, reserved_share: float, less: int) -> None:
    model = ModelConfig.from_folder(tiny_model)
    config = EngineConfig(model_dir=tiny_model, max_running=4, reserved_share=reserved_share)
    all_left = EngineConfig(model_dir=tiny_model, max_running=4)
    pages = arena_pages(all_left, model, lambda _: 0) - arena_pages(config, model, lambda _: 0)
    assert abs(pages * config.page_bytes(model) - less) <= config.page_bytes(model)


@pytest.mark.usefixtures("half_a_card")
def test_what_others_have_already_counts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that runs already has 20 of its 30 GiB when a worker starts."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (62 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    model = ModelConfig.from_folder(tiny_model)
    config = EngineConfig(model_dir=tiny_model, max_running=4, reserved_share=0.3)
    got = arena_pages(config, model, lambda _: 0) * config.page_bytes(model)
    expected = (62 - 0.02 * 100 - 10) * GIB - 4 * 40 * model.vocab_size
    assert 0 <= expected - got <= config.page_bytes(model)


def test_the_offline_engine_asks_for_both_pools_or_for_neither(tiny_model: Path) -> None:
    assert DashConfig().engine_config(tiny_model).arena_bytes is None
    both = DashConfig(adapter_vram_pool="1MB", kv_pool="3MB")
    assert both.engine_config(tiny_model).arena_bytes == 4_000_000
    assert DashConfig(kv_pool="3MB").engine_config(tiny_model).arena_bytes == 6_000_000


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter's")
def test_the_profile_run_writes_nothing(tiny_model: Path) -> None:
    config = EngineConfig(model_dir=tiny_model, use_triton=True, dtype="float32", max_running=3)
    model = ModelConfig.from_folder(tiny_model)
    layout = config.page_layout(model)
    page = torch.full((1, layout.page_elems), float("nan"))
    runner = GpuRunner(
        model=model,
        weights=load_weights(tiny_model, model, "cpu", torch.float32),
        layout=layout,
        arena=page,
        max_positions=64,
        max_running=2,
        max_drafted=3,
        max_tokens=8,
    )
    assert runner.profile_run() > 0
    assert page.isnan().all()


def check_that_it_goes(base: Path, adapter: Path, *, device: str, use_triton: bool) -> None:
    """At once: who makes the next engine cannot wait until Python looks for circles."""
    engine = Engine(
        EngineConfig(
            model_dir=base,
            arena_bytes=4 << 20,
            device=device,
            dtype="float32",
            use_triton=use_triton,
            max_step_tokens=64,
        )
    )
    engine.register_adapter("a", adapter)
    engine.add(request("a", prompt(8, 1), adapter="a", max_tokens=2))
    run(engine)
    engine.close()
    arena = weakref.ref(engine._runner.arena)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert arena() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("use_triton", [False, True])
def test_it_goes_with_the_engine(
    tiny_model: Path, adapters: dict[str, Path], use_triton: bool
) -> None:
    check_that_it_goes(tiny_model, adapters["all-4"], device="cpu", use_triton=use_triton)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_it_goes_from_a_card(tiny_model: Path, adapters: dict[str, Path]) -> None:
    check_that_it_goes(tiny_model, adapters["all-4"], device="cuda", use_triton=True)


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_card_is_used(tiny_model: Path) -> None:
    engine = Engine(EngineConfig(model_dir=tiny_model, device="cuda", max_step_tokens=2048))
    try:
        free, total = torch.cuda.mem_get_info()
        assert 0 < free < 0.1 * total
        assert engine.stats().num_pages > 1000
    finally:
        engine.close()
    del engine
    torch.cuda.empty_cache()


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_card_that_is_full_is_refused(tiny_model: Path) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfMemory):
        Engine(EngineConfig(model_dir=tiny_model, device="cuda"))
    del ballast
    torch.cuda.empty_cache()
