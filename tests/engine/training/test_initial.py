"""Initial adapters that are drawn beside the steps: nobody waits for them, and nothing changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.training import initial
from engine.training.events import RunProgress, RunStarted
from engine.training.run import RunSettings
from tests.engine.training.scenes import load, make_trainer, note, request, train


def test_a_run_whose_adapter_is_not_drawn_yet_keeps_no_other_waiting(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RunSettings(rank=2, steps=6, batch_size=4, target_modules=("v_proj",))
    first, second = request("first", settings), request("second", settings, seed=1)
    alone = train(make_trainer(load(tiny)), [second])["second"].adapter

    may_draw, draw = threading.Event(), initial.draw_initial
    trainer = make_trainer(load(tiny), runs_a_pass=1)
    trainer._initial.is_beside_steps = True  # as on a GPU
    trainer.add(first)
    results: dict[str, Any] = {}
    note(results, trainer.step())

    def slow(*asked: Any) -> torch.Tensor:
        assert may_draw.wait(60)
        return draw(*asked)

    monkeypatch.setattr(initial, "draw_initial", slow)
    trainer.add(second)
    for _ in range(3):
        events = trainer.step()
        assert [type(event) for event in events] == [RunProgress]
        note(results, events)
    may_draw.set()
    trainer._initial._drawn["second"].result(60)
    events = trainer.step()
    note(results, events)
    assert [event.run_id for event in events if isinstance(event, RunStarted)] == ["second"]
    while trainer.has_work:
        note(results, trainer.step())
    for name, tensor in results["second"].adapter.items():
        assert torch.equal(tensor, alone[name])
