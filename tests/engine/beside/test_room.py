"""Training beside serving on a CPU: both come to what each comes to alone, and pages come back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine import Engine, Request
from engine.beside.room import BesideConfig, TrainingRoom
from engine.errors import OutOfMemory
from engine.training.checkpoint import Checkpoint
from engine.training.events import RunProgress
from engine.training.memory import elements_of
from engine.training.model import TrainingModel
from engine.training.run import RunRequest
from engine.training.trainer import BatchTrainer
from tests.engine.conftest import MakeEngine, prompt, request, run
from tests.engine.conftest import Result as Served
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.training.scenes import Result, difference, eight_runs, make_trainer, note, train

ARENA = 24 << 20
CHOICES: list[Any] = [None, "qv-16", "patterns", {"qv-16": 0.5, "ko-1": 1.5}, "dora"]


class Feed:
    """Gives the engine one of its requests every few calls; keeps what it puts out."""

    def __init__(self, engine: Engine, requests: Sequence[Request], every: int = 5) -> None:
        self._engine, self._left, self._every = engine, list(requests), every
        self.results = {each.request_id: Served() for each in requests}
        self.calls = self.steps = 0

    def receive(self) -> None:
        self.calls += 1
        if self._left and self.calls % self._every == 0:
            self._engine.add(self._left.pop(0))

    def step(self) -> None:
        assert torch.is_grad_enabled()
        self.steps += 1
        for output in self._engine.step():
            self.results[output.request_id].add(output)

    def settle(self) -> None:
        for output in self._engine.settle():
            self.results[output.request_id].add(output)

    @property
    def is_done(self) -> bool:
        return not self._left and not self._engine.has_work()


def requests_of(count: int, length: int = 30, num_tokens: int = 12) -> list[Request]:
    return [
        request(
            f"r{i}", prompt(i, length + 7 * i), adapter=CHOICES[i % len(CHOICES)],
            max_tokens=num_tokens + i, temperature=float(i % 2), seed=i,
        )
        for i in range(count)
    ]  # fmt: skip


def sizes_of(engine: Engine, runs: Sequence[RunRequest]) -> list[int]:
    return [elements_of(engine.model, each.settings) for each in runs]


def alone(engine: Engine, runs: Sequence[RunRequest]) -> dict[str, Result]:
    weights = engine.lending.weights
    assert weights is not None
    model = TrainingModel(engine.model, weights)
    return train(make_trainer(model, token_budget=256, runs_a_pass=1), runs)


def opened(room: TrainingRoom, engine: Engine, runs: Sequence[RunRequest]) -> BatchTrainer:
    trainer = room.open(sizes_of(engine, runs))
    assert trainer is not None
    return trainer


@pytest.mark.parametrize("is_ahead", [False, True])
def test_both_come_to_what_they_come_to_alone(make_engine: MakeEngine, is_ahead: bool) -> None:
    requests, runs = requests_of(12), eight_runs()
    wanted = run(make_engine(arena_bytes=ARENA), *requests)
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    if is_ahead:  # as on a GPU, a step is in flight while layers are trained
        AheadRunner(engine)
    trained = alone(engine, runs)
    before = engine.stats()
    feed = Feed(engine, requests)
    room = TrainingRoom(engine, feed, BesideConfig())
    trainer = opened(room, engine, runs)
    assert len(engine.lending.pages) > 0
    results: dict[str, Result] = {}
    for each in runs:
        trainer.add(each)
    while trainer.has_work:
        note(results, trainer.step())
        engine.check_integrity()
    room.close()
    while not feed.is_done:
        room.give_way()
    for name, result in trained.items():
        assert result.losses == results[name].losses
        assert difference(result.adapter, results[name].adapter) == 0.0
    for name, served in wanted.items():
        assert feed.results[name].token_ids == served.token_ids
        assert feed.results[name].finish_reason == served.finish_reason
    after = engine.stats()
    assert not engine.lending.pages and room.trained_s > 0
    assert after.free_pages + after.adapter_pages == before.free_pages + before.adapter_pages


def test_what_was_prepared_leaves_nothing_behind(make_engine: MakeEngine) -> None:
    """Nor does a rank that finds no room keep others from it."""
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    before, feed = engine.stats(), Feed(engine, requests_of(3))
    room = TrainingRoom(engine, feed, BesideConfig(page_share=0.2))
    room.prepare((256, 4, 16))  # the first one needs more
    assert engine.stats() == before and room.trained_s == 0.0
    assert feed.calls == feed.steps == 0 and not room.is_open
    runs = eight_runs()[:2]
    trained, trainer, results = alone(engine, runs), opened(room, engine, runs), dict[str, Result]()
    for each in runs:
        trainer.add(each)
    while trainer.has_work:
        note(results, trainer.step())
    assert all(trained[name].losses == results[name].losses for name in trained)
    assert room.trained_s > 0 and feed.calls > 0


def test_what_cannot_be_prepared_keeps_no_worker_from_serving(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(*_: Any) -> int:
        raise OutOfMemory("too little")

    monkeypatch.setattr(TrainingRoom, "_num_recomputed", too_small)
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    before, room = engine.stats(), TrainingRoom(engine, Feed(engine, []), BesideConfig())
    room.prepare((4,))
    assert engine.stats() == before and not room.is_open


def test_pages_go_back_when_requests_need_them_and_the_runs_go_on_later(
    make_engine: MakeEngine,
) -> None:
    """Requests that fit the arena only without the trainer end as ever, none with an error."""
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    num_pages, runs = engine.stats().num_pages, eight_runs()[:3]
    trained = alone(engine, runs)
    feed = Feed(engine, requests_of(16, length=200, num_tokens=20), every=3)
    room = TrainingRoom(engine, feed, BesideConfig(page_share=0.985))
    trainer = room.open([num_pages * engine.lending.page_bytes // 32] * 10)
    assert trainer is not None and len(engine.lending.pages) >= int(0.985 * num_pages)
    results: dict[str, Result] = {}
    for each in runs:
        trainer.add(each)
    while trainer.has_work and not room.is_wanted_back:
        note(results, trainer.step())
    assert room.is_wanted_back
    saved = {each.run_id: trainer.checkpoint(each.run_id) for each in runs}
    room.close()
    assert not engine.lending.pages
    while not feed.is_done:
        room.give_way()
    assert {served.finish_reason for served in feed.results.values()} == {"length"}
    go_on(engine, room, runs, saved, results)
    for name, result in trained.items():
        assert result.losses == results[name].losses
        assert difference(result.adapter, results[name].adapter) == 0.0


def go_on(
    engine: Engine,
    room: TrainingRoom,
    runs: Sequence[RunRequest],
    saved: dict[str, Checkpoint | None],
    results: dict[str, Result],
) -> None:
    left = [each for each in runs if each.run_id not in results or not results[each.run_id].end]
    trainer = opened(room, engine, left)
    for each in left:
        trainer.add(each, saved[each.run_id])
    while trainer.has_work:
        note(results, trainer.step())
    room.close()
    engine.check_integrity()


def test_serving_goes_first_until_the_first_token(make_engine: MakeEngine) -> None:
    """Not a layer is trained while a request waits for it; then training has its share."""
    engine = make_engine(arena_bytes=ARENA, lends_weights=True, max_step_tokens=16)
    feed = Feed(engine, [request("r", prompt(1, 200), max_tokens=40)], every=1)
    room = TrainingRoom(engine, feed, BesideConfig(share=0.99, longest_s=60.0))
    runs = eight_runs()[:1]
    trainer = opened(room, engine, runs)
    trainer.add(runs[0])
    room.give_way()  # 13 steps of 16 tokens each
    assert len(feed.results["r"].token_ids) >= 1
    events = [event for _ in range(3) for event in trainer.step()]
    assert any(isinstance(event, RunProgress) for event in events)
    assert len(feed.results["r"].token_ids) < 40
    room.close()


def test_a_first_token_takes_one_step_of_those_that_are_in_flight(make_engine: MakeEngine) -> None:
    """It is read after a layer, by itself, and not by a further step before the layer."""
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    AheadRunner(engine)
    wanted = run(engine, request("alone", prompt(1, 30), max_tokens=40))["alone"].token_ids
    feed = Feed(engine, [request("r", prompt(1, 30), max_tokens=40)], every=1)
    room = TrainingRoom(engine, feed, BesideConfig(share=0.99, longest_s=60.0))
    runs = eight_runs()[:1]
    trainer = opened(room, engine, runs)
    trainer.add(runs[0])
    room.give_way()
    assert engine.computes_first_token and not feed.results["r"].token_ids
    room.give_way()
    assert feed.results["r"].token_ids == wanted[:1] and feed.steps == 1
    assert not engine.computes_first_token and engine.settle() == []
    room.close()
    while not feed.is_done:
        feed.step()
    assert feed.results["r"].token_ids == wanted


def test_who_lends_nothing_has_no_room(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="lends_weights"):
        TrainingRoom(engine, Feed(engine, []), BesideConfig())
    with pytest.raises(ValueError, match="page_share"):
        BesideConfig(page_share=1.0)


def test_no_loan_where_there_is_no_room_for_the_largest_run(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    room = TrainingRoom(engine, Feed(engine, []), BesideConfig())
    assert room.open([1 << 30]) is None
    assert not engine.lending.pages and not room.is_open
    engine.check_integrity()


def test_a_loan_takes_only_what_nobody_needs(make_engine: MakeEngine) -> None:
    """Pages of running requests and of adapters stay; forgotten prefixes are computed again."""
    engine = make_engine(arena_bytes=4 << 20, lends_weights=True)
    first = request("a", prompt(5, 120), adapter="qv-16", max_tokens=8)
    wanted = run(engine, first)["a"].token_ids
    assert engine.stats().cached_pages > 0
    running = request("b", prompt(6, 40), adapter="all-4", max_tokens=30)
    engine.add(running)
    while engine.stats().kv_pages == 0:
        engine.step()
    memory = engine.lending.lend(10_000)
    assert memory is not None
    memory.fill_(255)  # not a number, in every type
    engine.check_integrity()
    assert engine.lending.lend(1) is None
    outputs = run(engine)
    assert len(outputs["b"].token_ids) >= 29 and outputs["b"].error is None
    engine.lending.take_back()
    again = request("c", prompt(5, 120), adapter="qv-16", max_tokens=8)
    assert run(engine, again)["c"].token_ids == wanted


def test_whatever_happens_in_whatever_order(make_engine: MakeEngine) -> None:
    """Loans begin and end, runs are added, cancelled, saved and gone on with, requests come, are
    cancelled and crowd the arena: each run ends once with its own adapter, no page is lost."""
    chance = random.Random(20)
    engine = make_engine(arena_bytes=8 << 20, lends_weights=True)
    runs = {each.run_id: each for each in eight_runs()}
    wanted = alone(engine, list(runs.values()))
    feed = Feed(engine, requests_of(60, length=60, num_tokens=15), every=7)
    room = TrainingRoom(engine, feed, BesideConfig(page_share=0.9, share=0.5))
    left, saved = dict(runs), dict[str, Checkpoint]()
    results: dict[str, Result] = {}
    trainer: BatchTrainer | None = None
    for _ in range(4000):
        if not left and feed.is_done:
            break
        if trainer is None:
            trainer = room.open(sizes_of(engine, list(left.values()))) if left else None
            if trainer is None:
                feed.receive()
                feed.step()
                continue
            for name, each in left.items():
                trainer.add(each, saved.get(name))
        note(results, trainer.step())
        left = {n: r for n, r in left.items() if n not in results or results[n].end is None}
        engine.check_integrity()
        trainer.check_integrity()
        if chance.random() < 0.05:
            engine.cancel(chance.choice(list(feed.results)))
        is_crashed = chance.random() < 0.02  # nothing is saved then
        if room.is_wanted_back or is_crashed or chance.random() < 0.05 or not left:
            for name in left if not is_crashed else ():
                taken = trainer.checkpoint(name)
                if taken is not None:
                    saved[name] = taken
            room.close()
            trainer = None
            engine.check_integrity()
    room.close()
    assert not left and feed.is_done
    for name, result in wanted.items():
        assert difference(result.adapter, results[name].adapter) == 0.0


def test_training_goes_on_while_an_adapter_is_read(make_engine: MakeEngine) -> None:
    """A request that waits for a disk keeps nobody from the device; it is served once it can be."""
    engine = make_engine(arena_bytes=ARENA, lends_weights=True)
    reader: Any = engine._store._loader._reader
    load, is_read = reader.load, threading.Event()

    def held_up(*given: Any) -> None:
        is_read.wait()
        load(*given)

    reader.load = held_up
    feed = Feed(engine, [request("r", prompt(1, 30), adapter="qv-16", max_tokens=4)], every=1)
    room = TrainingRoom(engine, feed, BesideConfig())
    runs = eight_runs()[:1]
    trainer = opened(room, engine, runs)
    trainer.add(runs[0])
    results: dict[str, Result] = {}
    began = time.monotonic()
    while trainer.has_work:
        note(results, trainer.step())
    # A step a layer, each of which sleeps for 2 ms (0.3 s in all): not a second a layer (20 s).
    assert time.monotonic() - began < 5.0 and feed.results["r"].last is None
    is_read.set()
    while not feed.is_done:
        room.give_way()
    assert len(feed.results["r"].token_ids) == 4
    room.close()
