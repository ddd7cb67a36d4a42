"""What a trainer's events make of a run's progress."""

from __future__ import annotations

from controlplane.training.runs.trainer import Told


def test_draft_heads_are_told_beside_the_last_progress() -> None:
    """Also by a process that goes on among the heads, and has no step of its own to tell."""
    last = {"step": 9, "steps": 9, "loss": 0.5, "trained_tokens": 70}
    heads = {**last, "draft_head_loss": 1.5, "draft_head_accuracy": [0.5, 0.25]}
    for before in ([{"event": "progress", **last}], []):
        told = Told()
        for event in ({"event": "started", "rows": 4}, *before, {"event": "draft_heads", **heads}):
            told.note(event)
        assert told.progress == {"rows": 4, **heads}
