"""Training beside serving on a card: steps are in flight while layers are trained."""

from __future__ import annotations

import time

import pytest
import torch

from engine import Engine
from engine.beside.room import BesideConfig, TrainingRoom
from engine.training.model import TrainingModel
from tests.engine.beside.test_room import Feed, opened, requests_of
from tests.engine.conftest import MakeEngine
from tests.engine.training.scenes import Result, eight_runs, make_trainer, note, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Seconds after which a test that makes no progress says so, and where: without training a step is
# due every `BesideConfig.longest_s`.
MOST_S = 60.0


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    """Few sizes of graphs: each is recorded before the test begins."""
    return make_engine(
        device="cuda",
        arena_bytes=48 << 20,
        lends_weights=True,
        max_running=8,
        max_step_tokens=64,
        max_context=512,
    )


def state(engine: Engine, feed: Feed) -> str:
    """What a failure prints: pages, and how far each request is."""
    ends = {
        name: (len(served.token_ids), served.last and (served.finish_reason, served.error))
        for name, served in feed.results.items()
    }
    return f"lent {engine.lending.pages}; {engine.stats()}; requests {ends}"


def serve_to_the_end(engine: Engine, room: TrainingRoom, feed: Feed) -> None:
    until = time.monotonic() + MOST_S
    while time.monotonic() < until:
        if feed.is_done:
            return
        room.give_way()
    pytest.fail(f"requests did not end: {state(engine, feed)}")


def test_both_come_to_their_ends_and_pages_come_back(engine: Engine) -> None:
    weights = engine.lending.weights
    assert weights is not None
    runs, before = eight_runs(), engine.stats()
    alone = train(make_trainer(TrainingModel(engine.model, weights)), runs)
    feed = Feed(engine, requests_of(8))
    room = TrainingRoom(engine, feed, BesideConfig())
    trainer = opened(room, engine, runs)
    lent, results = engine.lending.pages, dict[str, Result]()
    for each in runs:
        trainer.add(each)
    until = time.monotonic() + MOST_S
    while trainer.has_work and time.monotonic() < until:
        note(results, trainer.step())
        engine.check_integrity()
    assert not trainer.has_work, f"runs did not end: {results.keys()}; {state(engine, feed)}"
    room.close()
    serve_to_the_end(engine, room, feed)
    told = f"lent then {lent}; before {before}; {state(engine, feed)}"
    assert {served.finish_reason for served in feed.results.values()} == {"length"}, told
    for name, wanted in alone.items():
        ours = results[name]
        assert ours.end is not None and ours.end.outcome == "finished", (name, ours.end, told)
        assert ours.losses == pytest.approx(wanted.losses, rel=0.03), (name, wanted.losses, told)
    after = engine.stats()
    assert not engine.lending.pages and room.trained_s > 0, told
    assert after.free_pages + after.adapter_pages == before.free_pages + before.adapter_pages, told
