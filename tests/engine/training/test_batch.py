"""Runs that are trained together become what each becomes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.model.families import save_family
from tests.engine.training.scenes import (
    difference,
    eight_runs,
    load,
    make_trainer,
    peft_train,
    train,
)

#: The largest difference of a value of an adapter: sums of the base's products in another order.
FLOAT32_BOUND = 2e-5


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, FLOAT32_BOUND)]
)
def test_eight_runs_together_give_the_adapters_of_each_alone(
    tiny: Path, dtype: torch.dtype, bound: float
) -> None:
    model = load(tiny, dtype)
    together = train(make_trainer(model), eight_runs())
    for asked in eight_runs():
        alone = train(make_trainer(model), [asked])[asked.run_id]
        shared = together[asked.run_id]
        assert len(shared.losses) == asked.settings.steps
        assert shared.losses == pytest.approx(alone.losses, abs=bound)
        assert difference(alone.adapter, shared.adapter) < bound


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2-sliding"])
def test_each_run_is_the_one_that_peft_and_the_trainer_make(family: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / family, family)
    together = train(make_trainer(load(folder)), eight_runs())
    for asked in eight_runs():
        peft, ours = peft_train(folder, asked, tmp_path / "out"), together[asked.run_id]
        assert ours.losses == pytest.approx(peft.losses, abs=1e-5)
        rates = [each.learning_rate for each in ours.progress]
        assert rates == pytest.approx(peft.rates, rel=1e-9, abs=0)
        norms = [each.grad_norm for each in ours.progress]
        assert norms == pytest.approx(peft.norms, rel=1e-3)
        # A single value of which the gradient is zero but for rounding may move either way.
        for tensor, wanted in peft.adapter.items():
            assert float((ours.adapter[tensor] - wanted).abs().mean()) < 1e-6


def test_with_one_run_a_pass_the_company_changes_no_bit(tiny: Path) -> None:
    model = load(tiny)
    together = train(make_trainer(model, runs_a_pass=1), eight_runs())
    for asked in reversed(eight_runs()):
        alone = train(make_trainer(model, runs_a_pass=1), [asked])[asked.run_id]
        assert together[asked.run_id].progress == alone.progress
        assert difference(together[asked.run_id].adapter, alone.adapter) == 0


def test_layers_that_are_computed_again_change_no_bit(tiny: Path) -> None:
    kept = train(make_trainer(load(tiny)), eight_runs())
    for recomputed in (1, 2):
        again = train(make_trainer(load(tiny, recomputed=recomputed)), eight_runs())
        for name, result in kept.items():
            assert again[name].progress == result.progress
            assert difference(again[name].adapter, result.adapter) == 0
