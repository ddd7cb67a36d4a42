"""Runs come, go, fail and are killed in any order: each ends once, and as it would alone."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import random
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from contract.training.job import RANGES
from engine.training.checkpoint import Checkpoint
from engine.training.errors import RunDiverged, RunRefused, RunUnsupported
from engine.training.events import RunEnded, RunStarted
from engine.training.model import TrainingModel
from engine.training.packer import MicroBatch
from engine.training.run import LINEARS, HeldOut, RunRequest, RunRows, RunSettings
from engine.training.trainer import BatchTrainer
from kernels.training import LoraSite, Pools
from tests.engine.training.scenes import (
    Result,
    difference,
    load,
    make_trainer,
    note,
    request,
    train,
)
from tests.range_ends import inside, outside

BOUND = 1e-12
#: Tokens that only one run has in its rows.
OWN_TOKENS = 4


class Watched(TrainingModel):
    """A model that looks at whose rows each segment has."""

    def backward(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        self._look(batch)
        return super().backward(batch, sites, pools)

    def token_losses(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        self._look(batch)
        return super().token_losses(batch, sites, pools)

    def _look(self, batch: MicroBatch) -> None:
        owners = []
        for start, end in itertools.pairwise(batch.segments.bounds):
            [owner] = {token // OWN_TOKENS for token in batch.token_ids[start:end].tolist()}
            owners.append(owner)
        assert len(set(owners)) == len(owners)


@pytest.fixture(scope="module")
def model(tiny: Path) -> TrainingModel:
    plain = load(tiny, torch.float64)
    return Watched(plain.config, plain._weights)


def marked_run(number: int, chance: random.Random) -> RunRequest:
    """A run whose rows consist of tokens that no other's have; one in three is validated."""

    def make_rows() -> RunRows:
        rows = []
        for _ in range(chance.randint(1, 6)):
            length, first = chance.randint(2, 20), number % 64 * OWN_TOKENS
            tokens = [first + chance.randrange(OWN_TOKENS) for _ in range(length)]
            rows.append((tokens, [i >= length // 2 for i in range(length)]))
        return RunRows.of(rows)

    held_out = None
    if chance.random() < 1 / 3:
        patience = chance.choice([None, 1])
        held_out = HeldOut(rows=make_rows(), every=chance.randint(1, 3), patience=patience)
    settings = RunSettings(
        rank=chance.choice([1, 2, 5, 16]),
        steps=chance.randint(1, 6),
        batch_size=chance.randint(1, 4),
        gradient_accumulation=chance.choice([1, 1, 2]),
        learning_rate=chance.choice([1e-3, 1e-2]),
        epsilon=1e-3,  # so that no gradient that is zero but for rounding is divided by itself
        target_modules=tuple(chance.sample(LINEARS, chance.randint(1, 7))),
        order=chance.choice(["group_by_length", "shuffled", "given"]),
        seed=number,
    )
    return RunRequest(
        run_id=f"run-{number}",
        tenant=f"tenant-{chance.randrange(3)}",
        rows=make_rows(),
        settings=settings,
        held_out=held_out,
    )


def poisoned(asked: RunRequest) -> RunRequest:
    """The run from an adapter whose product overflows."""
    return dataclasses.replace(asked, held_out=None, settings=dataclasses.replace(
        asked.settings, learning_rate=1, max_grad_norm=0, weight_decay=1e6, schedule="constant",
        steps=1000,
    ))  # fmt: skip


class Story:
    """A trainer that all kinds of things happen to, and what is known of its runs."""

    def __init__(self, model: TrainingModel, seed: int) -> None:
        self.model, self.chance = model, random.Random(seed)
        self.trainer = self.start()
        self.asked: dict[str, RunRequest] = {}
        self.poisoned: set[str] = set()
        self.cancelled: set[str] = set()
        self.saved: dict[str, Checkpoint] = {}
        self.results: dict[str, Result] = {}

    def start(self) -> BatchTrainer:
        budget, runs = self.chance.choice([20, 60, 200]), self.chance.randint(1, 6)
        return make_trainer(self.model, token_budget=budget, max_runs=runs, pool_elements=60_000)

    def left(self) -> list[str]:
        return [name for name in self.asked if self.result(name).end is None]

    def result(self, name: str) -> Result:
        return self.results.setdefault(name, Result())

    def add(self) -> None:
        asked = marked_run(len(self.asked), self.chance)
        if self.chance.random() < 1 / 4:
            asked = poisoned(asked)
            self.poisoned.add(asked.run_id)
        self.trainer.add(asked)
        self.asked[asked.run_id] = asked

    def cancel(self) -> None:
        if left := self.left():
            name = self.chance.choice(left)
            self.cancelled.add(name)
            self.trainer.cancel(name)

    def save(self) -> None:
        for name in self.left():
            saved = self.trainer.checkpoint(name)
            if saved is not None:
                self.saved[name] = Checkpoint(saved.tensors, json.loads(json.dumps(saved.state)))

    def kill(self) -> None:
        """Lose the trainer and what it has not told; go on from the checkpoints."""
        self.trainer = self.start()
        for name in self.left():
            self.cancelled.discard(name)
            saved = self.saved.get(name)
            del self.result(name).progress[told_steps(saved) if saved else 0 :]
            self.trainer.add(self.asked[name], saved)

    def step(self) -> None:
        note(self.results, self.trainer.step())
        self.trainer.check_integrity()


def told_steps(saved: Checkpoint) -> int:
    """The last step's validation may still have been under way."""
    return saved.step - (saved.state.get("validation", {}).get("made") is not None)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_run_ends_once_and_as_it_would_alone(
    model: TrainingModel, seed: int
) -> None:
    story = Story(model, seed)
    happenings = [story.add] * 3 + [story.step] * 12 + [story.save, story.cancel]
    for moment in range(150):
        story.chance.choice(happenings)()
        if moment % 60 == 59:
            story.kill()
    while story.trainer.has_work:
        story.step()
    assert story.trainer.used_elements == 0
    outcomes = set()
    for name, asked in story.asked.items():
        result = story.result(name)
        assert result.end is not None
        outcomes.add(result.end.outcome)
        if name in story.cancelled:
            assert result.end.outcome == "cancelled" and result.end.adapter is None
        elif name in story.poisoned:
            assert result.end.outcome == "failed" and isinstance(result.end.error, RunDiverged)
            assert result.end.error.step == result.end.step + 1 == len(result.progress) + 1
        else:
            assert result.end.outcome == "finished"
            alone = train(make_trainer(model), [asked])[name]
            steps = len(alone.progress) if asked.held_out else asked.settings.steps
            assert [each.step for each in result.progress] == [*range(1, steps + 1)]
            assert alone.end is not None and result.end.best_step == alone.end.best_step
            assert difference(alone.adapter, result.adapter) < BOUND
            assert result.losses == pytest.approx(alone.losses, abs=BOUND)
    assert outcomes == {"cancelled", "failed", "finished"}


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tiny: Path, stop: int) -> None:
    settings = RunSettings(rank=4, steps=7, batch_size=3, gradient_accumulation=2, warmup_steps=2)
    asked, model = request("run", settings, count=10), load(tiny)
    undisturbed = train(make_trainer(model, token_budget=24), [asked])["run"]

    trainer, results = make_trainer(model, token_budget=24), {"run": Result()}
    trainer.add(asked)
    while len(results["run"].progress) < stop:
        note(results, trainer.step())
    note(results, trainer.step())  # into the next step, whose rows are done again
    saved = trainer.checkpoint("run")
    assert saved is not None and saved.step == stop
    for _ in range(2):  # what goes on does not change it
        trainer.step()

    again = make_trainer(model, token_budget=24)
    again.add(asked, Checkpoint(saved.tensors, json.loads(json.dumps(saved.state))))
    resumed = Result()
    while again.has_work:
        note({"run": resumed}, again.step())
    assert resumed.starts[0].step == stop
    assert resumed.progress == undisturbed.progress[stop:]
    assert all(torch.equal(resumed.adapter[n], t) for n, t in undisturbed.adapter.items())


def test_a_checkpoint_is_taken_for_no_other_run(tiny: Path) -> None:
    asked, trainer = request("run", RunSettings(rank=4, steps=3)), make_trainer(load(tiny))
    trainer.add(asked)
    assert trainer.checkpoint("run") is None  # it waits still
    trainer.step()
    saved = trainer.checkpoint("run")
    assert saved is not None
    settings = dataclasses.replace(asked.settings, learning_rate=1.0)
    broken = Checkpoint({**saved.tensors, "master": saved.tensors["master"][:-1]}, saved.state)
    cases = {
        "settings": (dataclasses.replace(asked, settings=settings), saved),
        "rows": (request("run", asked.settings, seed=1), saved),
        "run_id": (dataclasses.replace(asked, run_id="other"), saved),
        "master": (asked, broken),
        "version": (asked, Checkpoint(saved.tensors, {**saved.state, "version": 0})),
    }
    for message, (other, given) in cases.items():
        with pytest.raises(RunRefused, match=message) as caught:
            make_trainer(load(tiny)).add(other, given)
        assert caught.value.param == "checkpoint"


def test_a_run_that_diverges_takes_nobody_with_it(tiny: Path) -> None:
    model = load(tiny)
    good = request("good", RunSettings(rank=4, steps=5, batch_size=2))
    bad = poisoned(request("bad", good.settings))
    results = train(make_trainer(model), [good, bad])
    end = results["bad"].end
    assert end is not None and end.outcome == "failed" and end.adapter is None
    assert isinstance(end.error, RunDiverged) and end.error.param == "learning_rate"
    assert f"not a number any more at step {end.step + 1}" in end.error.message
    alone = train(make_trainer(model), [good])["good"]
    assert all(tensor.isfinite().all() for tensor in results["good"].adapter.values())
    assert difference(alone.adapter, results["good"].adapter) < 1e-5


def test_a_warm_start_goes_on_from_the_given_adapter(tiny: Path) -> None:
    model, settings = load(tiny), RunSettings(rank=4, steps=4, batch_size=3, learning_rate=0.02)
    first = train(make_trainer(model), [request("first", settings)])["first"]
    resting = dataclasses.replace(settings, learning_rate=RANGES["learning_rate"].least)
    asked = dataclasses.replace(request("again", resting), adapter=first.adapter)
    again = train(make_trainer(model), [asked])["again"]
    assert difference(first.adapter, again.adapter) < 1e-6
    assert again.losses[0] < first.losses[0]


def test_what_the_batch_does_not_do_is_named(tiny: Path) -> None:
    trainer = make_trainer(load(tiny), pool_elements=20_000)
    for fields in (
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ("lm_head",)},
        {"trainable_token_ids": (3,)},
        {"init_lora_weights": "pissa"},
        {"layers": (1,)},
        {"target_modules": ("q_proj", "lm_head")},
    ):
        with pytest.raises(RunUnsupported) as caught:
            trainer.add(request("run", RunSettings(**fields)))
        assert caught.value.param == next(iter(fields))
    for fields in ({"rank": 0}, {"learning_rate": float("nan")}, {"steps": 0}, {"order": "odd"}):
        with pytest.raises(RunRefused) as refused:
            trainer.add(request("run", RunSettings(**fields)))
        assert refused.value.param == next(iter(fields))
    for name in ("rank", "batch_size", "learning_rate", "warmup_steps", "seed"):
        RunSettings(**{name: inside(RANGES[name])[1]}).check()
        for value in outside(RANGES[name]):
            with pytest.raises(RunRefused) as refused:
                trainer.add(request("run", RunSettings(**{name: value})))
            assert refused.value.param == name
    with pytest.raises(RunRefused, match="there is room for"):
        trainer.add(request("run", RunSettings(rank=64)))
    trainer.add(request("run", RunSettings(rank=2)))
    with pytest.raises(RunRefused, match="already"):
        trainer.add(request("run", RunSettings(rank=2)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([([1, 2], [False, True]), ([3, 4], [True, False])], "row 1 has no answer"),
        ([([1, 257], [False, True])], "outside the vocabulary"),
        ([([-1, 2], [False, True])], "outside the vocabulary"),
        ([([1] * 161, [True] * 161)], "row 0 has 161 tokens"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(
    tiny: Path, rows: list[tuple[list[int], list[bool]]], message: str
) -> None:
    with pytest.raises(RunRefused, match=message) as caught:
        make_trainer(load(tiny)).add(
            RunRequest(run_id="run", rows=RunRows.of(rows), settings=RunSettings())
        )
    assert caught.value.param == "rows"


def test_a_runs_rows_are_let_go_when_it_ends(tiny: Path) -> None:
    trainer = make_trainer(load(tiny))
    asked = request("run", RunSettings(rank=2, steps=2))
    held = weakref.ref(asked.rows)
    train(trainer, [asked])
    del asked
    gc.collect()
    assert held() is None


def test_closing_ends_every_run(tiny: Path) -> None:
    trainer, results = make_trainer(load(tiny), max_runs=2), dict[str, Result]()
    for number in range(4):
        trainer.add(request(f"run-{number}", RunSettings(rank=2, steps=50)))
    note(results, trainer.step())
    trainer.close()
    note(results, trainer.step())
    assert [result.end.outcome for result in results.values() if result.end] == ["cancelled"] * 4
    assert not trainer.has_work and trainer.used_elements == 0


def test_another_tenants_run_begins_when_the_next_run_ends(tiny: Path) -> None:
    trainer = make_trainer(load(tiny), max_runs=2)
    settings = RunSettings(rank=1, steps=2, batch_size=4, target_modules=("v_proj",))
    for number in range(20):
        trainer.add(dataclasses.replace(request(f"many-{number}", settings), tenant="many"))
    trainer.step()
    trainer.add(dataclasses.replace(request("one", settings), tenant="other"))
    order = []
    while trainer.has_work:
        for event in trainer.step():
            if isinstance(event, RunStarted | RunEnded):
                order.append((type(event), event.run_id))
    assert order[0] == (RunEnded, "many-0")
    assert (RunStarted, "one") in order[1:3]
    assert len([what for what, _ in order if what is RunEnded]) == 21
