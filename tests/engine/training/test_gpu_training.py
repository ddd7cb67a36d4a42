"""The batch on a card: bfloat16, Triton kernels, FlashAttention over packed rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.training.run import RunSettings
from tests.engine.model.families import save_family
from tests.engine.training.scenes import (
    Result,
    eight_runs,
    load,
    make_trainer,
    note,
    request,
    train,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2-sliding"])
def test_runs_together_learn_what_each_learns_alone_on_a_cpu(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / family, family)
    on_card, on_cpu = load(folder, torch.bfloat16, device="cuda"), load(folder)
    together = train(make_trainer(on_card), eight_runs())
    for asked in eight_runs():
        ours = together[asked.run_id]
        alone = train(make_trainer(on_cpu), [asked])[asked.run_id]
        assert ours.losses == pytest.approx(alone.losses, rel=0.03)
        for name, wanted in alone.adapter.items():
            moved = (ours.adapter[name] - wanted).abs().mean()
            assert float(moved) < 0.5 * asked.settings.steps * asked.settings.learning_rate


def test_layers_that_are_computed_again_change_nothing(tiny: Path) -> None:
    kept = train(make_trainer(load(tiny, torch.bfloat16, device="cuda")), eight_runs())
    model = load(tiny, torch.bfloat16, recomputed=2, device="cuda")
    again = train(make_trainer(model), eight_runs())
    for name, result in kept.items():
        assert again[name].losses == pytest.approx(result.losses, rel=1e-3)


def test_a_run_that_diverges_takes_nobody_with_it(tiny: Path) -> None:
    model = load(tiny, torch.bfloat16, device="cuda")
    good = request("good", RunSettings(rank=4, steps=5, batch_size=2))
    settings = dataclasses.replace(
        good.settings, learning_rate=1, weight_decay=1e6, max_grad_norm=0, steps=1000
    )
    results = train(make_trainer(model), [good, request("bad", settings)])
    end = results["bad"].end
    assert end is not None and end.outcome == "failed"
    alone = train(make_trainer(model), [good])["good"]
    assert results["good"].losses == pytest.approx(alone.losses, rel=0.01)


def test_a_run_goes_on_from_a_checkpoint(tiny: Path) -> None:
    model = load(tiny, torch.bfloat16, device="cuda")
    asked = request("run", RunSettings(rank=4, steps=6, batch_size=3))
    undisturbed = train(make_trainer(model), [asked])["run"]
    trainer, results = make_trainer(model), {"run": Result()}
    trainer.add(asked)
    while len(results["run"].progress) < 3:
        note(results, trainer.step())
    saved = trainer.checkpoint("run")
    again, resumed = make_trainer(model), Result()
    again.add(asked, saved)
    while again.has_work:
        note({"run": resumed}, again.step())
    assert resumed.losses == pytest.approx(undisturbed.losses[3:], rel=1e-3)
