"""The same engine on a GPU: in fp32 the tokens are the CPU's, adapters, chunks and all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.workload import save_random_adapter
from engine import Engine, EngineConfig
from engine.adapters.base_weights import BaseWeights, PlainWeights
from engine.adapters.files import AdapterReader
from engine.model.config import ModelConfig
from engine.model.weights import load_weights
from tests.engine.conftest import prompt, request, run, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RANKS = {"r1": 1, "r4": 4, "r16": 16, "r40": 40}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("gpu"), hidden_size=128, intermediate_size=256, head_dim=64
    )


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("adapters"), ModelConfig.from_folder(base)
    return {
        name: save_random_adapter(folder / name, model, rank=rank, seed=rank)
        for name, rank in RANKS.items()
    }


def generate(base: Path, adapters: dict[str, Path], **config: object) -> dict[str, list[int]]:
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=64 << 20, **config))  # type: ignore[arg-type]
    for name, path in adapters.items():
        engine.register_adapter(name, path)
    blend = {"r4": 0.4, "r16": 0.6}
    choices = [None, *adapters, blend]
    results = run(
        engine,
        *(
            request(f"{i}", prompt(i, 6 + 9 * i), adapter=adapter, max_tokens=24)
            for i, adapter in enumerate(choices)
        ),
    )
    engine.check_integrity()
    engine.close()
    return {request_id: result.token_ids for request_id, result in results.items()}


@pytest.mark.parametrize("max_step_tokens", [512, 16], ids=["whole", "chunks"])
def test_fp32_tokens_are_the_cpus(
    base: Path, adapters: dict[str, Path], max_step_tokens: int
) -> None:
    wanted = generate(base, adapters)
    got = generate(base, adapters, device="cuda", dtype="float32", max_step_tokens=max_step_tokens)
    assert got == wanted


@pytest.mark.parametrize("host_cache_bytes", [0, 64 << 20], ids=["disk", "host"])
def test_a_prefill_beside_its_adapters_copy_is_right(
    base: Path, adapters: dict[str, Path], host_cache_bytes: int
) -> None:
    """Room for one adapter: each use copies it anew, and the prefill starts before it is there."""
    wanted = generate(base, adapters, device="cuda", dtype="float32")
    model = ModelConfig.from_folder(base)
    config = EngineConfig(
        model_dir=base, device="cuda", dtype="float32", arena_bytes=64 << 20, max_running=2
    )
    base_weights = BaseWeights(model, PlainWeights(load_weights(base, model, "cpu", torch.float32)))
    reader = AdapterReader(model, config.page_layout(model), base_weights)
    num_pages = max(reader.place(reader.read_plan(path)).num_pages for path in adapters.values())
    engine = Engine(
        replace(
            config,
            host_cache_bytes=host_cache_bytes,
            max_adapter_bytes=num_pages * config.page_bytes(model),
        )
    )
    for name, path in adapters.items():
        engine.register_adapter(name, path)
    for _ in range(3):
        for i, name in enumerate(adapters, start=1):
            tokens = prompt(i, 6 + 9 * i)
            got = run(engine, request(name, tokens, adapter=name, max_tokens=24), check=True)
            assert got[name].token_ids == wanted[str(i)]
    engine.close()


def test_bf16_runs(base: Path, adapters: dict[str, Path]) -> None:
    got = generate(base, adapters, device="cuda")
    assert all(len(token_ids) == 24 for token_ids in got.values())


def test_a_steady_step_allocates_nothing(base: Path, adapters: dict[str, Path]) -> None:
    """Neither decodes ask the driver for memory, nor drawn tokens once their first step has run."""
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=64 << 20, device="cuda"))
    for name, path in adapters.items():
        engine.register_adapter(name, path)
    for temperature in (0.0, 0.8):
        for i, adapter in enumerate([None, *adapters]):
            engine.add(
                request(
                    f"{temperature} {i}",
                    prompt(i, 30),
                    adapter=adapter,
                    max_tokens=60,
                    temperature=temperature,
                    top_p=0.9,
                )
            )
        while engine.stats().num_generated % 300 < 5 * 5:
            engine.step()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        for _ in range(40):
            engine.step()
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        while engine.has_work():
            engine.step()
    engine.close()
