"""Every schema of the suite on a card: drafts change nothing, whatever their source.

The tokens of each way are the CPU's without drafts. All is fp32 and greedy, but for a few requests
with a seed. `PLAY_A_CARD=1` lets the CPU play it, where no card is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import Engine, FinishReason, Request
from engine.drafts.costs import GPU, StepCosts
from engine.drafts.heads import Asking
from tests.engine.conftest import MakeEngine, Oracle, Result, name_of, prompt, request, run
from tests.engine.drafts.test_drafts import (
    CASES,
    COPIED,
    SCHEMA,
    accepted,
    check_draws,
    planted,
    ready,
    same,
)
from tests.engine.drafts.test_heads import Planted as PlantedHeads
from tests.engine.execution.ahead_runner import AheadRunner

PLAYS = bool(os.environ.get("PLAY_A_CARD"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or PLAYS), reason="needs a card"),
]

ADAPTERS = (None, "all-4+heads", "qv-16", "dora+heads", "ends", {"all-4": 0.5, "mlp-rs": 1.5})
#: What a request may ask for beside its schema; each is met by every kind of adapter.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 7},  # inside a forced run, mostly
    {"stop_token_ids": (ord("u") - 33, ord("s") - 33)},
    {"remember": True},
    {"logprobs": 2},
    {"n": 2, "temperature": 1.0, "seed": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
)
#: A draft wherever there is one, as if rows and waiting were free.
FREE = replace(
    GPU,
    times=((0, 1.0), (1, 1.0)),
    waiting=0.0,
    waiting_each=0.0,
    following=0.0,
    asking=Asking(0.0, 0.0),
    max_asked=64,
)
NO_WAITING = replace(GPU, max_requests=0)
ROOM = {"max_running": 16, "max_step_tokens": 256}
SOURCES = ("forced", "choice", "lookup", "memory", "heads")


def on_card(make: MakeEngine, costs: StepCosts | None = None, **config: Any) -> Engine:
    """An engine on the card; with drafts at these costs, or without any."""
    has_drafts = {"speculation": costs is not None}
    if PLAYS:
        engine = ready(make(**has_drafts, **config))
        AheadRunner(engine)
    else:
        own = {"device": "cuda", "dtype": "float32", "use_triton": True}
        engine = ready(make(**own, **has_drafts, **config))
    if costs is not None:
        # There are no graphs for more rows than that.
        most = min(costs.max_rows, engine._speculation.costs.max_rows)
        engine._speculation.costs = replace(costs, max_rows=most)
    return engine


def needs_host(own: Request) -> bool:
    sampling = own.sampling
    return sampling.logprobs is not None or sampling.repetition_penalty != 1.0


def check(got: dict[str, Result], plain: dict[str, Result]) -> None:
    assert got.keys() == plain.keys()
    for name, expected in plain.items():
        same(got[name], expected)


@pytest.mark.parametrize("part", range(4))
def test_every_schema_and_prompt_on_a_card(
    make_headed: MakeEngine,
    part: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Three prompts each, more than 200 in all, in batches of 16 with and without adapters."""
    requests = [
        request(
            f"{name} {i}",
            (COPIED if i == 1 else []) + prompt(10 * number + i, 10 + 7 * i),
            adapter=ADAPTERS[(number + i) % len(ADAPTERS)],
            json_schema=json.dumps(case.schema),
            **{"max_tokens": 40, "ignore_eos": False, **OPTIONS[(number + i) % len(OPTIONS)]},
        )
        for number, (name, case) in enumerate(CASES.items())
        for i in range(3)
        if number % 4 == part
    ]
    assert 4 * len(requests) > 200
    plain = run(ready(make_headed(**ROOM)), *requests)
    check(run(on_card(make_headed, **ROOM), *requests), plain)
    check(run(on_card(make_headed, GPU, **ROOM), *requests), plain)

    engine = on_card(make_headed, FREE, **ROOM)
    check(run(engine, *requests), plain)
    again = [replace(each, remember=True) for each in requests]  # of their own answers, too
    check(run(engine, *again), plain)
    check(run(engine, *again), plain)
    drafts = engine.stats().drafts
    assert all(drafts[source].drafted for source in SOURCES), drafts
    assert sum(counts.accepted for counts in drafts.values()) > len(requests), drafts
    record_property("drafted and accepted", str(drafts))

    # A request that needs the host would make each of its steps wait.
    alone = [each for each in requests if not needs_host(each)]
    engine = on_card(make_headed, NO_WAITING, **ROOM)
    got = run(engine, *alone)
    check(got, {name: plain[name] for name in got})
    drafts = engine.stats().drafts
    assert drafts["forced"].accepted + drafts["choice"].accepted > len(alone) / 2, drafts

    mixed = [replace(each, speculation=i % 3 > 0) for i, each in enumerate(requests)]
    check(run(on_card(make_headed, FREE, **ROOM), *mixed), plain)

    engine = on_card(make_headed, FREE, **ROOM)
    engine._speculation._heads._guesses = PlantedHeads(engine, plain, every=3)
    check(run(engine, *requests), plain)
    assert engine.stats().drafts["heads"].accepted > 20

    monkeypatch.setattr("engine.drafts.speculation.propose", planted(plain))
    got = run(on_card(make_headed, FREE, **ROOM), *requests, check=True)
    check(got, plain)
    assert accepted(got) > sum(len(result.token_ids) for result in plain.values()) / 8


@pytest.mark.parametrize("costs", [FREE, NO_WAITING, GPU], ids=["free", "no waiting", "measured"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_preempted_in_mid_draft_on_a_card(make_headed: MakeEngine, costs: Any, batch: int) -> None:
    requests = [
        request(
            str(i),
            COPIED[: 30 + i] * 2,
            adapter="all-4+heads" if i % 3 == 2 else None,
            max_tokens=60,
            json_schema=SCHEMA if i % 2 else None,
        )
        for i in range(6)
    ]
    few: dict[str, Any] = {"max_running": batch, "prefix_cache": False}
    plain = run(ready(make_headed(**few)), *requests)
    few["min_adapter_bytes"] = (8 << 20) - 22 * 8192  # so that 22 pages are left to KV
    engine = on_card(make_headed, costs, **few)
    check(run(engine, *requests, check=True), plain)
    assert batch < 5 or engine.stats().num_preemptions > 0


@pytest.mark.parametrize("costs", [FREE, NO_WAITING], ids=["free", "no waiting"])
def test_cancelled_in_mid_draft_on_a_card(make_headed: MakeEngine, costs: Any) -> None:
    requests: list[Request] = [
        request(str(i), COPIED + prompt(i, 4), json_schema=SCHEMA, max_tokens=60, n=1 + i % 2)
        for i in range(6)
    ]
    plain = run(ready(make_headed()), *requests)
    engine = on_card(make_headed, costs, **ROOM)
    for each in requests:
        engine.add(each)
    results: dict[str, Result] = {}
    while engine.has_work():
        for output in engine.step():
            results.setdefault(name_of(output), Result()).add(output)
        engine.check_integrity()
        for i in (0, 1, 4):
            if str(i) in results and len(results[str(i)].token_ids) > 5 + 3 * i:
                engine.cancel(str(i))
    assert results.keys() == plain.keys()
    num_cancelled = 0
    for name, own in results.items():
        if own.finish_reason == FinishReason.CANCELLED:
            num_cancelled += 1
            assert own.token_ids == plain[name].token_ids[: len(own.token_ids)]
            assert own.last is not None and own.last.num_generated == len(own.token_ids)
        else:
            same(own, plain[name])
    assert num_cancelled >= 3


def test_drafts_do_not_move_the_distribution_on_a_card(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    check_draws(on_card(make_engine, FREE, max_running=64), oracle, 3200 if PLAYS else 102_400)


@pytest.mark.skipif(PLAYS, reason="a CPU has no graphs to time")
def test_a_card_times_its_steps_for_drafts(make_engine: MakeEngine) -> None:
    engine = on_card(make_engine)
    times = dict(engine._runner.step_times)
    assert 1 in times and len(times) > 2 and min(times.values()) > 0.0
    assert engine._speculation.costs.times[0] == (1, times[1])
