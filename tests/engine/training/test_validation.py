"""Runs are validated while they train: with which losses, which state is kept, when they end."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from engine.training.checkpoint import Checkpoint
from engine.training.errors import RunDiverged, RunRefused
from engine.training.held_out import Judged, held_out_losses
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings
from engine.training.trainer import BatchTrainer
from tests.engine.training.scenes import (
    Result,
    difference,
    eight_runs,
    load,
    make_rows,
    make_trainer,
    note,
    train,
)

SETTINGS = RunSettings(rank=4, steps=9, batch_size=2, learning_rate=3e-2, seed=3)


def validated(
    name: str = "run", settings: RunSettings = SETTINGS, rows: int = 7, **held_out: int | None
) -> RunRequest:
    return RunRequest(
        run_id=name,
        rows=make_rows(1, 6),
        settings=settings,
        held_out=HeldOut(rows=make_rows(2, rows), **{"every": 2, **held_out}),
    )


def states(model: TrainingModel, asked: RunRequest) -> dict[int, dict[str, torch.Tensor]]:
    """The run's adapter after each step but the last, trained without validation."""
    trainer = make_trainer(model)
    trainer.add(dataclasses.replace(asked, held_out=None))
    found: dict[int, dict[str, torch.Tensor]] = {}
    layout = AdapterLayout(model.config, asked.settings)
    while trainer.has_work:
        for event in trainer.step():
            found |= {event.step: event.adapter} if getattr(event, "adapter", None) else {}
        saved = trainer.checkpoint(asked.run_id)
        if saved is not None and saved.step:
            found[saved.step] = layout.tensors(saved.tensors["master"])
    return found


def loss_of(model: TrainingModel, asked: RunRequest, adapter: dict[str, torch.Tensor]) -> float:
    assert asked.held_out is not None
    judged = Judged(name="run", rows=asked.held_out.rows, settings=asked.settings, adapter=adapter)
    [found] = held_out_losses(model, [judged], token_budget=1000, pool_elements=1 << 20)
    return found.mean


def curve(result: Result) -> dict[int, float]:
    return {e.step: e.validation_loss for e in result.progress if e.validation_loss is not None}


def test_runs_are_validated_together_and_keep_their_best_states(tiny: Path) -> None:
    model = load(tiny)
    asked = [
        dataclasses.replace(each, held_out=HeldOut(rows=make_rows(50 + i, 3 + i), every=1 + i % 3))
        for i, each in enumerate(eight_runs())
    ]
    together = train(make_trainer(model), [*asked[:6], *eight_runs()[6:]])
    for each in asked[:6]:
        result, after = together[each.run_id], states(model, each)
        assert each.held_out is not None and result.end is not None
        steps, every = each.settings.steps, each.held_out.every
        assert set(curve(result)) == {
            s for s in range(1, steps + 1) if s % every == 0 or s == steps
        }
        wanted = {step: loss_of(model, each, after[step]) for step in curve(result)}
        assert curve(result) == pytest.approx(wanted, abs=1e-5)
        best = min(wanted, key=lambda step: wanted[step])
        assert result.end.best_step == best
        assert result.end.best_loss == curve(result)[best]
        assert difference(result.adapter, after[best]) < 2e-5
        lowest = math.inf
        for told in result.progress:
            lowest = min(lowest, told.validation_loss or math.inf)
            assert told.best_loss == (None if lowest == math.inf else lowest)
    for plain in eight_runs()[6:]:
        alone = train(make_trainer(model), [plain])[plain.run_id]
        assert difference(alone.adapter, together[plain.run_id].adapter) < 2e-5
        assert together[plain.run_id].end.best_step is None  # type: ignore[union-attr]


def test_with_one_run_a_pass_validation_changes_no_bit_of_anybody(tiny: Path) -> None:
    model = load(tiny)
    plain, asked = eight_runs()[0], validated("validated", rows=12)
    alone = {
        each.run_id: train(make_trainer(model, runs_a_pass=1), [each]) for each in (plain, asked)
    }
    together = train(make_trainer(model, runs_a_pass=1), [plain, asked])
    for name, own in alone.items():
        assert together[name].progress == own[name].progress
        assert difference(together[name].adapter, own[name].adapter) == 0
    unseen = train(make_trainer(model), [dataclasses.replace(asked, held_out=None)])["validated"]
    assert unseen.losses == together["validated"].losses


def test_a_run_that_gets_no_better_ends(tiny: Path) -> None:
    """Its rows to validate with say the opposite of what it learns."""
    model = load(tiny)
    contrary = RunRows.of([([1, 2, 3, 4], [False, False, True, True])] * 2)
    learned = RunRows.of([([1, 2, 9, 9], [False, False, True, True])] * 2)
    asked = RunRequest(
        run_id="run",
        rows=learned,
        settings=dataclasses.replace(SETTINGS, steps=40),
        held_out=HeldOut(rows=contrary, every=1, patience=3),
    )
    result = train(make_trainer(model), [asked])["run"]
    losses = [told.validation_loss for told in result.progress]
    assert len(losses) < 40
    best = min(range(len(losses)), key=lambda at: losses[at] or math.inf)
    assert len(losses) == best + 1 + 3
    assert result.end is not None and result.end.outcome == "finished"
    assert result.end.best_step == best + 1


def diverging(trainer: BatchTrainer, asked: RunRequest, after: int) -> Result:
    """Train, and spoil the run's parameters after one of its steps."""
    results: dict[str, Result] = {}
    trainer.add(asked)
    while trainer.has_work:
        note(results, trainer.step())
        run = trainer._active.get(asked.run_id)
        if run is not None and run.step == after and not run.is_validating:
            trainer._pools.values[run.span.elements] = float("nan")
            trainer._pools.master[run.span.elements] = float("nan")
    return results[asked.run_id]


def test_one_that_diverges_ends_with_its_best_state_if_it_has_one(tiny: Path) -> None:
    model, asked = load(tiny), validated(every=2)
    undisturbed = train(make_trainer(model), [asked])["run"]
    result = diverging(make_trainer(model), asked, after=3)
    assert result.end is not None and result.end.outcome == "finished"
    assert (result.end.best_step, len(result.progress)) == (2, 3)
    assert all(tensor.isfinite().all() for tensor in result.adapter.values())
    assert result.progress == undisturbed.progress[:3]
    first = diverging(make_trainer(model), asked, after=1)
    assert first.end is not None and isinstance(first.end.error, RunDiverged)


def test_losses_that_are_no_numbers_are_no_best_ones(tiny: Path) -> None:
    model = load(tiny)
    asked = validated(every=1, patience=2)
    trainer, results = make_trainer(model), dict[str, Result]()
    token_losses = model.token_losses
    model.token_losses = lambda *given: token_losses(*given) * float("nan")  # type: ignore[method-assign]
    trainer.add(asked)
    while trainer.has_work:
        note(results, trainer.step())
    result = results["run"]
    assert [told.validation_loss for told in result.progress] == [None, None]
    assert result.end is not None and result.end.best_step is None
    assert difference(result.adapter, states(load(tiny), asked)[2]) < 2e-5  # the last state


@pytest.mark.parametrize("steps", [2, 3, 5, 9])
def test_it_goes_on_from_a_checkpoint_that_is_taken_in_the_midst_of_a_validation(
    tiny: Path, steps: int
) -> None:
    """Of rows that take four passes: the run is between two of them."""
    model, asked = load(tiny), validated(rows=9, every=2)
    undisturbed = train(make_trainer(model, token_budget=24), [asked])["run"]
    trainer, results = make_trainer(model, token_budget=24), {"run": Result()}
    trainer.add(asked)
    while trainer._active.get("run") is None or trainer._active["run"].step < steps:
        note(results, trainer.step())
    is_validating = trainer._active["run"].is_validating
    assert is_validating == (steps in (2, 9))
    note(results, trainer.step())
    saved = trainer.checkpoint("run")
    assert saved is not None
    again = make_trainer(model, token_budget=24)
    again.add(asked, Checkpoint(saved.tensors, json.loads(json.dumps(saved.state))))
    resumed = Result()
    while again.has_work:
        note({"run": resumed}, again.step())
    told = len(results["run"].progress)
    assert told == steps - is_validating == resumed.starts[0].step
    assert resumed.progress == undisturbed.progress[told:]
    assert resumed.end is not None and undisturbed.end is not None
    assert resumed.end.best_step == undisturbed.end.best_step
    assert difference(resumed.adapter, undisturbed.adapter) == 0


def test_a_checkpoint_of_another_validation_is_refused(tiny: Path) -> None:
    model, asked = load(tiny), validated(every=1)
    trainer = make_trainer(model)
    trainer.add(asked)
    while trainer._active.get("run") is None or trainer._active["run"].step < 2:
        trainer.step()
    saved = trainer.checkpoint("run")
    assert saved is not None and "best" in saved.tensors
    without = {name: tensor for name, tensor in saved.tensors.items() if name != "best"}
    cases = {
        "held_out": (validated(every=2), saved),
        "held_out are": (dataclasses.replace(asked, held_out=None), saved),
        "its validation": (asked, Checkpoint(without, saved.state)),
        "its best is not": (asked, Checkpoint({**without, "best": torch.zeros(3)}, saved.state)),
        "KeyError": (asked, Checkpoint(saved.tensors, {**saved.state, "validation": {}})),
    }
    for message, (other, given) in cases.items():
        with pytest.raises(RunRefused, match=message) as caught:
            make_trainer(model).add(other, given)
        assert caught.value.param == "checkpoint"


def test_what_is_no_validation_is_refused(tiny: Path) -> None:
    trainer = make_trainer(load(tiny))
    for fields in ({"every": 0}, {"patience": 0}):
        with pytest.raises(RunRefused, match="not 1 or more"):
            trainer.add(validated(**fields))
    silent = RunRows.of([([1, 2], [False, False])])
    asked = dataclasses.replace(validated(), held_out=HeldOut(rows=silent, every=1))
    with pytest.raises(RunRefused, match="row 0 has no answer"):
        trainer.add(asked)
