"""Greedy tokens in fp32 are Hugging Face's and PEFT's, whatever else the engine is doing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from tests.engine.conftest import (
    ADAPTERS,
    LINEARS,
    MakeEngine,
    Oracle,
    prompt,
    request,
    run,
    save_adapter,
    save_model,
)
from worker.base_model import packaged_model

BASE_MODELS = Path(__file__).parents[2] / ".cache" / "base"
WITH_BASE = [None, *ADAPTERS]


def test_base_equals_hugging_face(make_engine: MakeEngine, oracle: Oracle) -> None:
    prompts = {f"r{n}": prompt(n, n) for n in (1, 2, 15, 16, 17, 40)}
    results = run(make_engine(), *(request(i, p, max_tokens=24) for i, p in prompts.items()))
    for request_id, tokens in prompts.items():
        assert results[request_id].token_ids == oracle.generate(tokens, 24)
        assert results[request_id].finish_reason == "length"


def mixed_requests(num_tokens: int = 20) -> list[tuple[str | None, list[int], str]]:
    """Two requests of every adapter and of the base, prompts of 5 to 21 tokens."""
    return [
        (adapter, prompt(7 * i + j, 5 + i + 8 * j), f"{adapter}/{j}")
        for j in range(2)
        for i, adapter in enumerate(WITH_BASE)
    ]


def assert_mixed(engine: Engine, oracle: Oracle, num_tokens: int = 20) -> None:
    cases = mixed_requests()
    results = run(
        engine,
        *(request(i, p, adapter=a, max_tokens=num_tokens) for a, p, i in cases),
        check=True,
    )
    for adapter, tokens, request_id in cases:
        assert results[request_id].token_ids == oracle.generate(tokens, num_tokens, adapter)


def test_mixed_batch_equals_peft(make_engine: MakeEngine, oracle: Oracle) -> None:
    assert_mixed(make_engine(), oracle)


def test_adapters_change_the_answer(oracle: Oracle) -> None:
    answers = {tuple(oracle.generate(prompt(3, 9), 20, adapter)) for adapter in WITH_BASE}
    assert len(answers) == len(WITH_BASE)


def test_chunked_prefill_does_not_change_tokens(make_engine: MakeEngine, oracle: Oracle) -> None:
    assert_mixed(make_engine(max_step_tokens=7, max_running=5), oracle)


def test_preemption_does_not_change_tokens(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(arena_bytes=64 * 2048 * 4, max_running=16)
    assert_mixed(engine, oracle, num_tokens=40)
    assert engine.stats().num_preemptions > 0


def test_eviction_and_return_do_not_change_tokens(make_engine: MakeEngine, oracle: Oracle) -> None:
    """The arena holds the largest adapter and little more, so adapters come and go."""
    engine = make_engine(arena_bytes=64 * 2048 * 4, max_running=2, host_cache_bytes=0)
    for _ in range(2):
        for adapter in ("all-64", "all-4", None, "patterns"):
            got = run(engine, request("r", prompt(1, 9), adapter=adapter, max_tokens=8))["r"]
            assert got.token_ids == oracle.generate(prompt(1, 9), 8, adapter)


def test_many_requests_of_one_adapter(make_engine: MakeEngine, oracle: Oracle) -> None:
    """More rows than a stack takes for one adapter, beside a single one of another."""
    prompts = [prompt(i, 3 + i) for i in range(12)]
    requests = [
        request(str(i), p, adapter="patterns", max_tokens=6 + i) for i, p in enumerate(prompts)
    ]
    results = run(
        make_engine(), *requests, request("x", prompt(99, 4), adapter="all-4", max_tokens=20)
    )
    for i, tokens in enumerate(prompts):
        assert results[str(i)].token_ids == oracle.generate(tokens, 6 + i, "patterns")
    assert results["x"].token_ids == oracle.generate(prompt(99, 4), 20, "all-4")


def test_requests_that_come_and_go(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Arrivals during other requests' prefill and decode, of changing adapters."""
    engine = make_engine(max_step_tokens=24)
    got: dict[str, list[int]] = {}
    cases = {
        f"{i}": (WITH_BASE[i % len(WITH_BASE)], prompt(i, 4 + 5 * (i % 7)), 3 + i % 11)
        for i in range(24)
    }
    queue = list(cases)
    while queue or engine.has_work():
        for request_id in queue[:2]:
            adapter, tokens, count = cases[request_id]
            engine.add(request(request_id, tokens, adapter=adapter, max_tokens=count))
        del queue[:2]
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    for request_id, (adapter, tokens, count) in cases.items():
        assert got[request_id] == oracle.generate(tokens, count, adapter)


BLENDS = {
    "two": {"all-4": 0.7, "qv-16": 0.3},
    "three": {"patterns": 0.5, "mlp-rs": 1.5, "ko-1": 0.25},
    "one": {"all-4": 0.5},
}


def test_blends_equal_peft_cat(make_engine: MakeEngine, oracle: Oracle) -> None:
    for name, weights in BLENDS.items():
        oracle.blend(name, weights)
    cases = {name: prompt(i, 10) for i, name in enumerate(BLENDS)}
    results = run(
        make_engine(),
        *(request(n, p, adapter=BLENDS[n], max_tokens=16) for n, p in cases.items()),
        request("plain", prompt(5, 10), adapter="all-4", max_tokens=16),
    )
    for name, tokens in cases.items():
        assert results[name].token_ids == oracle.generate(tokens, 16, name)
    assert results["plain"].token_ids == oracle.generate(prompt(5, 10), 16, "all-4")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=["mqa", "mha-tied", "wide-heads-theta"],
)
def test_other_shapes(tmp_path: Path, changes: dict[str, object]) -> None:
    base = save_model(tmp_path / "base", seed=4, **changes)
    adapter = {"a": save_adapter(base, tmp_path / "a", r=9, target_modules=LINEARS)}
    oracle = Oracle(base, adapter)
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20))
    engine.register_adapter("a", adapter["a"])
    results = run(
        engine,
        request("base", prompt(0, 20), max_tokens=12),
        request("a", prompt(1, 20), adapter="a", max_tokens=12),
    )
    engine.close()
    assert results["base"].token_ids == oracle.generate(prompt(0, 20), 12)
    assert results["a"].token_ids == oracle.generate(prompt(1, 20), 12, "a")


def test_smollm2_with_adapters_equals_peft(tmp_path: Path) -> None:
    pytest.importorskip("gguf")  # GPU machines have none
    base_model = packaged_model(BASE_MODELS)
    shapes = ("all-4", "mlp-rs", "patterns")
    adapters = {
        name: save_adapter(base_model, tmp_path / name, **ADAPTERS[name]) for name in shapes
    }
    oracle = Oracle(base_model, adapters)
    engine = Engine(EngineConfig(model_dir=base_model, arena_bytes=512 << 20))
    for name, path in adapters.items():
        engine.register_adapter(name, path)
    cases = {name: prompt(i, 12 + i) for i, name in enumerate([None, *shapes])}
    results = run(
        engine,
        *(request(str(n), p, adapter=n, max_tokens=8) for n, p in cases.items()),
    )
    engine.check_integrity()
    engine.close()
    for name, tokens in cases.items():
        assert results[str(name)].token_ids == oracle.generate(tokens, 8, name)
