"""Pinned prefixes: computed once, always found by those whose they are, bounded, let go again."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import (
    AdapterPart,
    ContextTooLong,
    Engine,
    FinishReason,
    InvalidPrompt,
    OutOfPages,
    PinLimitExceeded,
    RequestError,
    UnknownAdapter,
)
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run

PAGE_BYTES = 2048 * 4
SYSTEM = prompt(1, 70)  # four full pages
QV = (AdapterPart(digest="qv-16"),)


def settle(engine: Engine) -> None:
    while engine.has_work():
        assert engine.step() == []
        engine.check_integrity()


def cached(result: Result) -> int:
    assert result.last is not None
    return result.last.num_cached_tokens


def flood(engine: Engine) -> None:
    """Fill the arena with other prefixes many times over."""
    for i in range(12):
        run(engine, request("fill", prompt(100 + i, 300), max_tokens=1), check=True)


def unpin_all(engine: Engine) -> None:
    engine.unpin_prefix(SYSTEM)
    engine.unpin_prefix(SYSTEM, tenant_id="a")
    engine.unpin_prefix(SYSTEM, adapters=QV)
    assert engine.stats().pinned_pages == 0


def test_a_pinned_prefix_survives_every_pressure(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES)
    engine.pin_prefix(SYSTEM, adapters=QV)
    settle(engine)
    assert engine.stats().pinned_pages == 4 and engine.stats().kv_pages == 0
    flood(engine)
    tokens = SYSTEM + prompt(2, 9)
    got = run(engine, request("r", tokens, adapter="qv-16", max_tokens=6), check=True)["r"]
    assert cached(got) == 64
    assert got.token_ids == oracle.generate(tokens, 6, "qv-16")
    unpin_all(engine)
    flood(engine)
    assert cached(run(engine, request("r", SYSTEM, adapter="qv-16", max_tokens=1))["r"]) == 0


def test_without_a_pin_the_same_pressure_evicts(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES)
    run(engine, request("r", SYSTEM, max_tokens=1))
    flood(engine)
    assert cached(run(engine, request("r", SYSTEM, max_tokens=1))["r"]) == 0


def test_pinning_is_idempotent_and_computes_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(3):
        engine.pin_prefix(SYSTEM)
        settle(engine)
    assert engine.stats().num_generated == 1
    assert engine.stats().pinned_pages == 4
    run(engine, request("r", prompt(7, 40), max_tokens=1))
    engine.pin_prefix(prompt(7, 40))  # all there
    assert not engine.has_work()
    engine.unpin_prefix(prompt(7, 40))
    engine.unpin_prefix(prompt(8, 40))  # never was
    unpin_all(engine)


def test_pins_serve_nobody_else(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.pin_prefix(SYSTEM, tenant_id="a", adapters=QV)
    settle(engine)
    for tenant, adapter in [("b", "qv-16"), ("a", None), ("a", "all-4"), ("a", {"qv-16": 0.5})]:
        made = request("r", SYSTEM, adapter=adapter, tenant_id=tenant, max_tokens=1)  # type: ignore[arg-type]
        assert cached(run(engine, made)["r"]) == 0
    made = request("r", SYSTEM, adapter="qv-16", tenant_id="a", max_tokens=1)
    assert cached(run(engine, made)["r"]) == 64
    engine.unpin_prefix(SYSTEM, tenant_id="b", adapters=QV)
    assert engine.stats().pinned_pages == 4
    engine.unpin_prefix(SYSTEM, tenant_id="a", adapters=QV)
    assert engine.stats().pinned_pages == 0


def test_the_budget_is_a_share_of_the_arena(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=60 * PAGE_BYTES, pin_share=0.1)
    engine.pin_prefix(SYSTEM)
    with pytest.raises(PinLimitExceeded) as raised:
        engine.pin_prefix(SYSTEM, tenant_id="a")
    assert raised.value.code == "overloaded"
    engine.pin_prefix(prompt(3, 32))
    settle(engine)
    assert engine.stats().pinned_pages == 6
    engine.unpin_prefix(SYSTEM)
    engine.pin_prefix(SYSTEM, tenant_id="a")
    engine.unpin_prefix(prompt(3, 32))
    unpin_all(engine)
    settle(engine)


@pytest.mark.parametrize(
    ("token_ids", "parts", "error"),
    [
        ([], (), RequestError),
        (prompt(1, 15), (), RequestError),
        ([300] * 16, (), InvalidPrompt),
        ([1] * 512, (), ContextTooLong),
        (prompt(1, 16), (AdapterPart(digest="nobody"),), UnknownAdapter),
    ],
    ids=["empty", "short", "vocabulary", "context", "adapter"],
)
def test_what_cannot_be_pinned_is_refused(
    make_engine: MakeEngine,
    token_ids: list[int],
    parts: tuple[AdapterPart, ...],
    error: type[Exception],
) -> None:
    engine = make_engine()
    with pytest.raises(error):
        engine.pin_prefix(token_ids, adapters=parts)
    assert not engine.has_work() and engine.stats().pinned_pages == 0


def test_without_a_prefix_cache_nothing_can_be_pinned(make_engine: MakeEngine) -> None:
    with pytest.raises(RequestError):
        make_engine(prefix_cache=False).pin_prefix(SYSTEM)


def test_unpinned_while_it_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(max_step_tokens=16)
    for num_steps in range(7):
        engine.pin_prefix(SYSTEM, tenant_id=str(num_steps))
        for _ in range(num_steps):
            assert engine.step() == []
        engine.unpin_prefix(SYSTEM, tenant_id=str(num_steps))
        settle(engine)
        assert engine.stats().pinned_pages == 0


def test_unregistering_an_adapter_unpins(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.pin_prefix(SYSTEM, adapters=QV)
    engine.pin_prefix(SYSTEM, adapters=(*QV, AdapterPart(digest="all-4", weight=0.5)))
    engine.pin_prefix(SYSTEM)
    settle(engine)
    assert engine.stats().pinned_pages == 12
    engine.unregister_adapter("qv-16")
    settle(engine)
    assert engine.stats().pinned_pages == 4
    unpin_all(engine)


def test_interactive_requests_go_first_and_the_pin_follows(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine(arena_bytes=60 * PAGE_BYTES, max_running=2)
    engine.pin_prefix(SYSTEM)
    crowd = [request(str(i), prompt(i, 200), max_tokens=30) for i in range(6)]
    results = run(engine, *crowd, check=True)
    assert results.keys() == {str(i) for i in range(6)}
    for i in range(6):
        assert results[str(i)].token_ids == oracle.generate(prompt(i, 200), 30)
    assert engine.stats().pinned_pages == 4
    unpin_all(engine)


def test_a_pin_whose_adapter_cannot_be_read_is_tried_again_later(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    broken = tmp_path / "adapter"
    broken.mkdir()
    for file in adapters["qv-16"].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    engine.register_adapter("mine", broken)
    content = (broken / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").unlink()
    parts = (AdapterPart(digest="mine"),)
    engine.pin_prefix(SYSTEM, adapters=parts)
    settle(engine)
    assert engine.stats().pinned_pages == 0
    (broken / "adapter_model.safetensors").write_bytes(content)
    now[0] = 100.0
    engine.step()
    settle(engine)
    assert engine.stats().pinned_pages == 4
    engine.unpin_prefix(SYSTEM, adapters=parts)


def test_what_pins_leave_bounds_a_request(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=60 * PAGE_BYTES, pin_share=0.5)
    for i in range(2):
        engine.pin_prefix(prompt(i, 240))
    settle(engine)
    with pytest.raises(OutOfPages):
        engine.add(request("other", prompt(5, 500)))
    tokens = prompt(0, 240) + prompt(5, 260)
    own = run(engine, request("own", tokens, max_tokens=3), check=True)["own"]
    assert own.finish_reason == FinishReason.LENGTH and cached(own) == 240
    for i in range(2):
        engine.unpin_prefix(prompt(i, 240))
    assert run(engine, request("other", prompt(5, 500), max_tokens=2))["other"].error is None
