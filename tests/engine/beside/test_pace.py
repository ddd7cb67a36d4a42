"""When serving's next step is due."""

from __future__ import annotations

import pytest

from engine.beside.pace import Pace


def test_the_first_step_is_due_at_once() -> None:
    assert Pace(0.9, 10.0).is_due(5.0, 0.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_training_gets_its_share_of_the_time(share: float) -> None:
    """A step takes 10 ms, a layer 0.1."""
    pace = Pace(share, 1.0)
    now = trained = 0.0
    for _ in range(20_000):
        if pace.is_due(now, trained):
            pace.note_step(now, trained)
            now += 0.010
        else:
            now += 0.0001
            trained += 0.0001
    assert trained / now == pytest.approx(share, abs=0.03)


def test_a_step_waits_no_longer_than_that() -> None:
    """Whatever the share, and also where nothing was trained."""
    for layer in (0.001, 0.0):
        pace = Pace(0.99, 0.05)
        pace.note_step(0.0, 0.0)
        assert not pace.is_due(0.049, layer * 40)
        assert pace.is_due(0.05, layer * 40)
