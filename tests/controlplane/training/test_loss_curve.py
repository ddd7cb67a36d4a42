"""The line of a training's losses."""

from __future__ import annotations

from controlplane.training.runs.batch_child import parse_event
from controlplane.training.runs.trainer import MAX_CURVE_POINTS, LossCurve


def test_long_training_keeps_its_ends_and_few_points() -> None:
    curve = LossCurve()
    for step in range(1, 10_001):
        curve.add(step, 1 / step)
    assert len(curve.points) <= MAX_CURVE_POINTS
    assert curve.points[0] == [1, 1.0]
    assert curve.points[-1] == [10_000, 1 / 10_000]
    steps = [step for step, _ in curve.points]
    assert steps == sorted(set(steps))


def test_same_step_told_twice_counts_once() -> None:
    curve = LossCurve()
    for step in (1, 1, 2, 2, 2):
        curve.add(step, 3.0)
    assert [step for step, _ in curve.points] == [1, 2]


def test_diverged_loss_is_nothing_to_draw_or_store() -> None:
    assert parse_event(b'{"event": "progress", "step": 3, "loss": NaN}')["loss"] is None
