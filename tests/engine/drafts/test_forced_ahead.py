"""Text that a grammar forces behind tokens in flight: its steps wait for nothing."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, FinishReason, Request
from engine.drafts.costs import GPU
from engine.drafts.profile import Place
from engine.engine import Engine as Steps
from engine.model.config import ModelConfig
from engine.sequence import Sequence
from tests.engine.conftest import MakeEngine, Result, prompt, request, run
from tests.engine.drafts.test_drafts import SCHEMA, accepted, ready, same
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.execution.test_ahead import Game

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

#: Its forced text is longer than `MAX_DRAFTS` tokens, its choices are few.
LONG = json.dumps(
    {
        "type": "object",
        "properties": {"is_a_name_of_many_letters": {"enum": ["yes", "no"]}, "n": {"const": 12}},
        "required": ["is_a_name_of_many_letters", "n"],
        "additionalProperties": False,
    }
)
CROWD = {"max_running": 40, "max_step_tokens": 256}


def ahead(make_engine: MakeEngine, **config: Any) -> tuple[Engine, AheadRunner]:
    """An engine whose CPU plays a GPU, and that never waits for drafts."""
    engine = ready(make_engine(speculation=True, **config))
    engine._speculation.costs = replace(GPU, max_requests=0)
    return engine, AheadRunner(engine)


def test_a_crowd_does_not_wait_for_forced_text(make_engine: MakeEngine) -> None:
    """Two steps for a forced text, however long, up to `MAX_DRAFTS`; nothing is read before."""
    requests = [
        request(str(i), prompt(i, 5 + i % 3), json_schema=SCHEMA, max_tokens=100, ignore_eos=False)
        for i in range(30)
    ]
    plain = run(ready(make_engine(**CROWD)), *requests)
    engine, counted = ahead(make_engine, **CROWD)
    got = run(engine, *requests, check=True)
    for name, expected in plain.items():
        same(got[name], expected)
    stats = engine.stats()
    assert stats.drafts["forced"].accepted > 30 * 15
    assert sum(counts.accepted for counts in stats.drafts.values()) == accepted(got)
    rejected = sum(r.last.num_rejected_drafts for r in got.values() if r.last is not None)
    drafted = sum(counts.drafted for counts in stats.drafts.values())
    assert drafted == accepted(got) + rejected
    longest = max(len(result.token_ids) for result in plain.values())
    assert stats.step < 0.5 * longest
    # Where each row of the step before was void, all tokens are known.
    assert counted.counts["known"] <= 3, "a step waited for tokens"


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "top_p": 0.8, "n": 2},
    {"stop_token_ids": (ord("u") - 33, ord("d") - 33)},  # inside forced text
    {"speculation": False},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 2},
    {"min_tokens": 3},
    {"remember": True},
]
#: Those whose tokens a device can choose come more often.
CHANCES = (4, 4, 4, 2, 2, 1, 1, 1, 2)


def ask(name: str, choose: random.Random) -> Request:
    [way] = choose.choices(WAYS, CHANCES)
    options: dict[str, Any] = {
        "adapter": choose.choice([None, "all-4", "dora"]),
        "max_tokens": choose.choice([1, 2, 5, 9, 14, 21, 60]),
        "json_schema": choose.choice([SCHEMA, SCHEMA, LONG, None]),
        "ignore_eos": False,
    }
    return request(name, prompt(choose.randrange(4), choose.choice([3, 15, 30])), **options, **way)


def often_wrong(choose: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Have choices among few drafted that are wrong as often as not, as if they were sure."""

    def choice(_: Any, place: Place) -> tuple[int, float]:
        return choose.choice(place[1]), 0.97

    patch.setattr("engine.drafts.profile.Profile.choice", choice)


def noted_rewinds(engine: Engine, patch: pytest.MonkeyPatch) -> list[bool]:
    """Of each sequence that went on behind a wrong draft: whether it still ran."""
    rewound: list[bool] = []
    rewind = engine._scheduler.tables.rewind

    def noted(sequence: Sequence) -> None:
        rewound.append(sequence.is_running)
        rewind(sequence)

    patch.setattr(engine._scheduler.tables, "rewind", noted)
    return rewound


@pytest.mark.parametrize("seed", range(6))
def test_whoever_comes_and_goes_gets_the_tokens_of_running_alone(
    make_engine: MakeEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends, limits, cancels, preemptions and wrong guesses inside forced text."""
    choose = random.Random(seed)
    config = {
        "arena_bytes": choose.choice([80, 120, 400]) * 2048 * 4,
        "max_step_tokens": choose.choice([12, 40, 200]),
        "max_running": choose.choice([3, 6, 9]),
        "prefix_cache": choose.random() < 0.7,
    }
    requests = [ask(str(i), choose) for i in range(24)]
    alone = ready(make_engine())
    wanted: dict[str, Result] = {}
    for each in requests:
        wanted |= run(alone, each)
    if seed % 2:  # drawn tokens are often not sure, and what went on from them is taken back
        monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    if seed >= 3:
        often_wrong(choose, monkeypatch)
    engine, counted = ahead(make_engine, **config)
    rewound = noted_rewinds(engine, monkeypatch)
    if seed in (2, 3):  # steps that wait stand among those that do not
        monkeypatch.setattr(engine._speculation, "costs", replace(GPU, max_rows=48))
        monkeypatch.setattr(engine._speculation, "waits", lambda step: choose.random() < 0.3)
    game = Game(engine, requests, choose)
    assert counted.counts["unread"] + counted.counts["same"] > 0
    assert engine.stats().drafts["forced"].accepted > 40
    assert rewound or seed < 4
    for name, result in wanted.items():
        got = game.got.get(name, [])
        if game.reasons[name] == FinishReason.CANCELLED:
            assert name.split("/")[0] in game.cancelled
            assert got == result.token_ids[: len(got)]
        else:
            assert got == result.token_ids, name
            assert game.reasons[name] == result.finish_reason


def test_wrong_choices_across_pages_that_others_share(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with a draft that is wrong is never offered; the next answers read what is cached."""
    schema = json.dumps({"type": "array", "items": {"enum": ["one", "two", "ten"]}, "minItems": 40})
    choose = random.Random(5)
    requests = [
        request(str(i), prompt(1, 9), json_schema=schema, max_tokens=90, **way)
        for i, way in enumerate(({}, *({"temperature": 0.7, "seed": i} for i in range(3))))
    ]
    plain = run(ready(make_engine()), *requests)
    often_wrong(choose, monkeypatch)
    engine, _ = ahead(make_engine, max_running=4)
    rewound = noted_rewinds(engine, monkeypatch)
    for _ in range(2):
        got = run(engine, *requests, check=True)
        for name, expected in plain.items():
            same(got[name], expected)
    assert rewound.count(True) > 40
    for name, result in plain.items():  # the KV of each answer so far, from the cache
        own = requests[int(name)]
        again = replace(own, token_ids=[*own.token_ids, *result.token_ids], json_schema=None)
        again = replace(again, sampling=replace(own.sampling, temperature=0.0, max_tokens=6))
        wanted = run(ready(make_engine()), again)
        found = run(engine, again, check=True)
        assert found[name].last is not None and found[name].last.num_cached_tokens >= 80
        same(found[name], wanted[name])


def test_a_wrong_choice_of_a_sequence_that_is_preempted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(6)
    requests = [
        request(str(i), prompt(i, 150 + i), json_schema=SCHEMA, max_tokens=80, ignore_eos=False)
        for i in range(16)
    ]
    plain = run(ready(make_engine()), *requests)
    often_wrong(choose, monkeypatch)
    engine, _ = ahead(make_engine, arena_bytes=80 * 2048 * 4, max_running=8)
    rewound = noted_rewinds(engine, monkeypatch)
    got = run(engine, *requests, check=True)
    for name, expected in plain.items():
        same(got[name], expected)
    assert rewound.count(False) > 0, "none was preempted between a wrong draft and its verification"


def bare(model: Path, num_pages: int, **config: Any) -> Engine:
    """An engine without adapters, whose CPU plays a GPU, in an arena of so many pages."""
    size = num_pages * EngineConfig(model_dir=model).page_bytes(ModelConfig.from_folder(model))
    engine = ready(Engine(EngineConfig(model_dir=model, arena_bytes=size, **config)))
    engine._speculation.costs = replace(GPU, max_requests=0)
    return engine


def test_an_unsure_token_behind_certain_drafts_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the step begin with a certain draft, so its tokens are read late."""
    regex = "forced at once: [a-z]{9} and then more text: [a-z]{9}"
    drawn = [
        request("drawn", prompt(9, 5), max_tokens=50, temperature=2.0, seed=seed, regex=regex)
        for seed in range(8)
    ]
    plain = [run(ready(make_engine()), each) for each in drawn]
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    for each, wanted in zip(drawn, plain, strict=True):
        engine, _ = ahead(make_engine)
        same(run(engine, each, check=True)["drawn"], wanted["drawn"])


def test_a_wrong_draft_for_which_there_is_no_page(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer just fits the arena, and what was drafted does not."""
    others = 0
    for seed in range(8):
        own = request("x", prompt(seed, 26), regex="xx(a!|b{30}!)", max_tokens=40)
        plain = run(bare(tiny_model, 2), own)["x"]
        if plain.error is None:  # it did not take the long way
            others += 1
            with monkeypatch.context() as patch:
                longest = lambda _, place: (max(place[1]), 0.97)  # noqa: E731
                patch.setattr("engine.drafts.profile.Profile.choice", longest)
                engine = bare(tiny_model, 2, speculation=True)
                AheadRunner(engine)
                same(run(engine, own, check=True)["x"], plain)
    assert others > 1


def test_rows_behind_a_wrong_guess_make_no_step_wait(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drawn, too; nobody asks whether that was sure. One step is planned from known tokens
    alone behind each wrong draft, as there is no other request."""
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    own = request(
        "x", prompt(3, 6), regex="([ab][cd]-){12}", max_tokens=60, temperature=1.0, seed=1
    )
    often_wrong(random.Random(1), monkeypatch)
    engine = bare(tiny_model, 400, speculation=True)
    rewound = noted_rewinds(engine, monkeypatch)
    counted = AheadRunner(engine)
    run(engine, own, check=True)
    assert engine.stats().drafts["choice"].drafted > 5
    assert counted.counts["known"] <= 1 + len(rewound)


def test_a_forced_text_behind_a_wrong_token_is_taken_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before drew a token that is not sure; the pages of the drafts are given back."""
    others = [
        request(str(i), prompt(i, 8 + i), max_tokens=20, regex="forced at once: [ab]{9}")
        for i in range(8)
    ]
    drawn = [
        request("drawn", prompt(9, 5), max_tokens=30, temperature=1.5, top_p=0.97, seed=seed)
        for seed in range(6)
    ]
    engine = ready(make_engine())
    plain = [run(engine, each, *others) for each in drawn]
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    dropped: list[int] = []
    for each, wanted in zip(drawn, plain, strict=True):
        engine, _ = ahead(make_engine, max_running=9)
        run(engine, *others)  # so that no grammar has to be compiled when the drawn one begins
        drop = engine._speculation.drop

        def noted(step: Any, drop: Any = drop) -> None:
            dropped.append(sum(len(row.drafts) for row in step.rows))
            drop(step)

        monkeypatch.setattr(engine._speculation, "drop", noted)
        got = run(engine, each, *others, check=True)
        for name, expected in wanted.items():
            same(got[name], expected)
            last = got[name].last
            assert last is not None
            assert last.num_rejected_drafts == 0 or name == "drawn"
    assert max(dropped) > 0, "no step with drafts was taken back"


@pytest.mark.parametrize("adapter", [None, "all-4"])
def test_forced_text_runs_ahead_on_the_gpu_runner(
    make_engine: MakeEngine, adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows of a decode graph, launched before the tokens of the step before are read."""
    requests = [
        request("greedy", prompt(1, 6), adapter=adapter, json_schema=SCHEMA, max_tokens=12),
        request("drawn", prompt(2, 9), json_schema=SCHEMA, max_tokens=8, temperature=1.0, seed=2),
        request("free", prompt(3, 4), adapter=adapter, max_tokens=6),
    ]
    wanted = run(ready(make_engine()), *requests)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    config = {"device": device, "dtype": "float32", "use_triton": True, "max_running": 4}
    engine = ready(make_engine(speculation=True, **config))
    engine._speculation.costs = replace(engine._speculation.costs, max_requests=0)
    launched_over: list[bool] = []
    schedule = Steps._schedule

    def noted(self: Engine, previous: Any, now: float) -> Any:
        step = schedule(self, previous, now)
        if step.rows:  # else an adapter or a grammar is not there yet
            launched_over.append(previous is not None)
        return step

    monkeypatch.setattr(Steps, "_schedule", noted)
    got = run(engine, *requests, check=True)
    for name, expected in wanted.items():
        same(got[name], expected)
    assert accepted(got) > 8
    assert launched_over.count(False) <= 2 < launched_over.count(True)
