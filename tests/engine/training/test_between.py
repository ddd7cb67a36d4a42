"""Between the layers of a pass the caller may do something else: nothing changes but the time."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from tests.engine.training.scenes import difference, eight_runs, load, make_trainer, train


def test_the_trainer_gives_way_between_all_layers_both_ways_in_its_own_thread(tiny: Path) -> None:
    plain = train(make_trainer(load(tiny)), eight_runs())
    model = load(tiny)
    calls: list[int] = []

    def between() -> None:
        calls.append(threading.get_ident())
        assert torch.is_grad_enabled()
        with torch.inference_mode():  # as the engine's step
            torch.ones(3) + 1

    model.between = between
    trainer = make_trainer(model)
    passes = 0
    count = trainer._model.backward

    def counted(*given: object) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return count(*given)  # type: ignore[arg-type]

    trainer._model.backward = counted  # type: ignore[method-assign,assignment]
    found = train(trainer, eight_runs())
    assert set(calls) == {threading.get_ident()}
    copies = 2 * len(plain)  # where a run begins and where it ends
    assert len(calls) == passes * (2 * model.config.num_layers + 1) + copies
    for name, result in plain.items():
        assert result.losses == found[name].losses
        assert difference(result.adapter, found[name].adapter) == 0.0
