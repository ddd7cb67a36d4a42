"""The engine's counters: each step and each load is counted once."""

from __future__ import annotations

from engine.stats import Distribution
from tests.engine.conftest import MakeEngine, request, run


def test_values_are_counted_in_their_ranges() -> None:
    values = Distribution((1, 2, 4))
    for value in (0.5, 1, 2, 3, 100):
        values.add(value)
    assert (values.counts, values.total) == ([2, 1, 1, 1], 106.5)
    copied = values.copy()
    values.add(1)
    assert copied.counts == [2, 1, 1, 1]


def test_steps_and_loads_are_counted_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    run(engine, *(request(f"r{n}", [1, 2, n], adapter="all-4", max_tokens=5) for n in range(3)))
    stats = engine.stats()
    assert stats.step_rows is not None and stats.step_seconds is not None
    assert sum(stats.step_rows.counts) == sum(stats.step_seconds.counts) == stats.step > 0
    assert stats.num_generated <= stats.step_rows.total <= 3 * stats.step
    assert stats.step_seconds.total > 0
    for tier in ("host", "arena"):
        loads = stats.adapter_loads[tier]
        assert (loads.loads, loads.failures) == (1, 0)
        assert loads.seconds >= 0
