"""Training beside serving on a card: steps are in flight while layers are trained."""

from __future__ import annotations

import pytest
import torch

from engine.beside.room import BesideConfig, TrainingRoom
from engine.training.model import TrainingModel
from tests.engine.beside.test_room import Feed, opened, requests_of
from tests.engine.conftest import MakeEngine
from tests.engine.training.scenes import Result, eight_runs, make_trainer, note, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_both_come_to_their_ends_and_pages_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(
        device="cuda", arena_bytes=48 << 20, lends_weights=True, reserved_share=0.1
    )
    weights = engine.lending.weights
    assert weights is not None
    runs = eight_runs()
    alone = train(make_trainer(TrainingModel(engine.model, weights)), runs)
    feed = Feed(engine, requests_of(12))
    room = TrainingRoom(engine, feed, BesideConfig())
    trainer = opened(room, engine, runs)
    results: dict[str, Result] = {}
    for each in runs:
        trainer.add(each)
    while trainer.has_work:
        note(results, trainer.step())
        engine.check_integrity()
    room.close()
    while not feed.is_done:
        room.give_way()
    assert {served.finish_reason for served in feed.results.values()} == {"length"}
    for name, result in alone.items():
        assert results[name].losses == pytest.approx(result.losses, rel=0.03)
    assert not engine.lending.pages and room.trained_s > 0
