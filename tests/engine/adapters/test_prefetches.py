"""Adapters that are in the arena before a request needs them, and those that stay there."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import AdapterUnavailable, Engine
from engine.memory.pin_choice import choose_pins
from tests.engine.adapters.test_tiers import PAGE_BYTES, step_until
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run

#: The last is almost as large as the arenas here.
NAMES = ("all-4", "qv-16", "patterns", "ko-1", "mlp-rs", "all-64")


def settle(engine: Engine) -> None:
    """Step until nothing is on its way."""
    step_until(engine, lambda: not engine.has_work(), {})


def resident(engine: Engine) -> set[str]:
    return set(engine.stats().resident_digests)


def test_a_prefetch_to_the_arena_needs_no_request(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    engine.prefetch("qv-16")
    engine.prefetch("all-4", to_arena=True)
    assert engine.has_work()
    settle(engine)
    assert resident(engine) == {"all-4"}
    assert set(engine.stats().host_digests) == {"all-4", "qv-16"}
    loads = engine.stats().adapter_loads["host"].loads
    got = run(engine, request("r", prompt(0, 5), adapter="all-4", max_tokens=6))
    assert got["r"].token_ids == oracle.generate(prompt(0, 5), 6, "all-4")
    assert engine.stats().adapter_loads["host"].loads == loads
    engine.prefetch("all-4", to_arena=True)  # it is there
    assert not engine.has_work()


def test_what_cannot_be_read_is_given_up(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    (tmp_path / "gone").symlink_to(engine._store._adapters["all-4"].path)
    engine.register_adapter("gone", tmp_path / "gone")
    (tmp_path / "gone").unlink()
    engine.prefetch("gone", to_arena=True)
    settle(engine)
    assert "gone" not in resident(engine)
    status = engine.adapter_status("gone")
    assert status is not None and isinstance(status.failure, AdapterUnavailable)


def test_pinned_adapters_stay_while_others_come_and_go(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=66 * PAGE_BYTES, adapter_pin_share=0.5)
    engine.pin_adapters([("a", "ko-1")])
    settle(engine)
    assert resident(engine) == {"ko-1"} == set(engine.stats().pinned_digests)
    for _ in range(2):
        for name in NAMES:
            run(engine, request("r", prompt(0, 20), adapter=name, max_tokens=4))
            assert "ko-1" in resident(engine)
    assert len(resident(engine)) < len(NAMES), "the arena has room for all: nothing was proved"
    engine.pin_adapters([])
    assert engine.stats().pinned_digests == ()
    engine.check_integrity()


def test_a_request_that_needs_the_whole_arena_gets_it(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    """It would wait for ever beside the pinned ones."""
    engine = make_engine(arena_bytes=60 * PAGE_BYTES, adapter_pin_share=1.0)
    engine.pin_adapters([("a", "all-4"), ("b", "qv-16")])
    settle(engine)
    assert engine.stats().pinned_digests
    got = run(engine, request("large", prompt(0, 12), adapter="all-64", max_tokens=4))
    assert got["large"].token_ids == oracle.generate(prompt(0, 12), 4, "all-64")
    assert engine.stats().pinned_digests == ()
    engine.check_integrity()


def test_an_adapter_that_is_unregistered_is_pinned_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(adapter_pin_share=0.5)
    engine.pin_adapters([("a", "ko-1"), ("a", "never-was")])
    settle(engine)
    engine.unregister_adapter("ko-1")
    assert engine.stats().pinned_digests == ()
    assert resident(engine) == set()
    engine.check_integrity()


@pytest.mark.parametrize(
    ("wanted", "max_pages", "chosen"),
    [
        ("a1 a2 a3 b4", 8, "a1 b4 a2"),  # a has half, b comes before a's second
        ("a1 a2 b3 c4", 6, "a1 b3 c4"),  # all have one before anybody has two
        ("a1 b1", 8, "a1"),  # the same adapter counts once
        ("a1", 3, ""),  # more than half
        ("a1 b2", 2, ""),
        ("", 8, ""),
    ],
)
def test_pins_are_shared_out(wanted: str, max_pages: int, chosen: str) -> None:
    """Each of two pages; written as tenant and digest."""
    pairs = [(pair[0], pair[1:]) for pair in wanted.split()]
    pages = {digest: 2 for _, digest in pairs}
    got = choose_pins(pairs, pages, max_pages)
    assert got == [pair[1:] for pair in chosen.split()]
