"""The same request gives the same tokens whatever happens around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import Engine, Priority
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run

PAGE_BYTES = 2048 * 4
CHOICES: list[Any] = [None, "qv-16", "patterns", {"qv-16": 0.5, "ko-1": 1.5}]
LENGTH, COUNT = 50, 20


@pytest.fixture(params=CHOICES, ids=["base", "one", "mixed-ranks", "blend"])
def adapter(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def wanted(adapter: Any, oracle: Oracle, make_engine: MakeEngine) -> list[int]:
    """Hugging Face's tokens; a blend's are those it has alone, which the oracle tests compare."""
    if not isinstance(adapter, dict):
        return oracle.generate(prompt(1, LENGTH), COUNT, adapter)
    return tokens(make_engine(prefix_cache=False), adapter)


def tokens(engine: Engine, adapter: Any, *others: Any, **fields: Any) -> list[int]:
    made = request("r", prompt(1, LENGTH), adapter=adapter, max_tokens=COUNT, **fields)
    return run(engine, *others, made, check=True)["r"].token_ids


def test_in_a_crowd(make_engine: MakeEngine, adapter: Any, wanted: list[int]) -> None:
    crowd = [
        request(f"o{i}", prompt(10 + i, 7 + 30 * i), adapter=name, max_tokens=25, temperature=1.0)
        for i, name in enumerate([None, "all-4", "qv-16", "mlp-rs", {"all-4": 1.0, "ko-1": 2.0}])
    ]
    assert tokens(make_engine(max_step_tokens=37), adapter, *crowd) == wanted


def test_behind_a_prefix(make_engine: MakeEngine, adapter: Any, wanted: list[int]) -> None:
    engine = make_engine()
    assert tokens(engine, adapter) == wanted
    assert tokens(engine, adapter) == wanted
    assert engine.stats().cached_pages > 0


def test_after_preemption(make_engine: MakeEngine, adapter: Any, wanted: list[int]) -> None:
    """As batch work it gives way to every interactive request, in the midst of its answer."""
    engine = make_engine(max_running=1)
    # Read first: a request whose adapter is still being read takes nobody's place.
    run(engine, request("first", prompt(9, 3), adapter="ko-1", max_tokens=1))
    run(engine, request("second", prompt(8, 3), adapter=adapter, max_tokens=1))
    made = request(
        "r", prompt(1, LENGTH), adapter=adapter, max_tokens=COUNT, priority=Priority.BATCH
    )
    engine.add(made)
    found: list[int] = []
    for i in range(200):
        if i % 5 == 4:
            engine.add(request(f"o{i}", prompt(i, 30), adapter="ko-1", max_tokens=1))
        for output in engine.step():
            found += output.token_ids if output.request_id == "r" else []
        engine.check_integrity()
        if len(found) == COUNT:
            break
    assert engine.stats().num_preemptions >= 3
    assert found == wanted


def test_after_its_adapter_was_evicted(
    make_engine: MakeEngine, adapter: Any, wanted: list[int]
) -> None:
    if adapter is None:
        pytest.skip("the base model is never evicted")
    engine = make_engine(arena_bytes=66 * PAGE_BYTES, host_cache_bytes=0)
    assert tokens(engine, adapter) == wanted
    resident = set(engine.stats().resident_digests)
    run(engine, request("big", prompt(2, 115), adapter="all-64", max_tokens=2))
    assert not resident & set(engine.stats().resident_digests)
    assert tokens(engine, adapter) == wanted


def test_after_another_adapter_was_unregistered(
    make_engine: MakeEngine, oracle: Oracle, adapters: dict[str, Path]
) -> None:
    """One of the same shape, whose copy lay before its own."""
    engine = make_engine()
    engine.register_adapter("before", adapters["qv-16"])
    for name in ("before", "qv-16"):
        run(engine, request("r", prompt(1, LENGTH), adapter=name, max_tokens=2))
    engine.unregister_adapter("before")
    assert tokens(engine, "qv-16") == oracle.generate(prompt(1, LENGTH), COUNT, "qv-16")
