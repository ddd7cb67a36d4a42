"""Drafts whose tokens a device chooses, all of a step at once, between steps that run ahead."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import Engine, FinishReason, Request
from engine.drafts.costs import GPU
from engine.sampling.grammar import Matcher
from tests.engine.conftest import MakeEngine, Result, prompt, request, run
from tests.engine.drafts.test_drafts import (
    ADAPTERS,
    CASES,
    COPIED,
    SCHEMA,
    accepted,
    planted,
    ready,
    same,
)
from tests.engine.execution.ahead_runner import AheadRunner

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

ROOM = {"max_running": 24, "max_step_tokens": 256}


def ahead(make_engine: MakeEngine, **config: Any) -> tuple[Engine, AheadRunner]:
    """An engine whose CPU plays a GPU."""
    engine = ready(make_engine(speculation=True, **config))
    engine._speculation.costs = replace(GPU, max_rows=48)
    return engine, AheadRunner(engine)


def check(make_engine: MakeEngine, *requests: Request, **config: Any) -> dict[str, Result]:
    """What is generated with drafts, own ones and planted ones, after seeing that it is the same
    as without."""
    plain = run(ready(make_engine(**config)), *requests)
    engine, _ = ahead(make_engine, **config)
    own = run(engine, *requests, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.drafts.speculation.propose", planted(plain))
        engine, _ = ahead(make_engine, **config)
        found = run(engine, *requests, check=True)
    assert own.keys() == plain.keys() == found.keys()
    for name, expected in plain.items():
        same(own[name], expected)
        same(found[name], expected)
    assert accepted(found) > sum(len(result.token_ids) for result in plain.values()) / 8
    return own


def ways(count: int) -> list[dict[str, Any]]:
    """Greedy and drawn, cut or not; some need the host: then all of their step do."""
    known: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9},
        {"temperature": 1.2, "seed": 3, "top_k": 7, "n": 2},
        {"stop_token_ids": (7, 30)},
        {"speculation": False},
    ]
    return [known[i % len(known)] for i in range(count)]


def test_schemas_and_free_text_with_adapters(make_engine: MakeEngine) -> None:
    cases = [case for i, case in enumerate(CASES.values()) if i % 12 == 0]
    requests = [
        request(
            str(i),
            COPIED + prompt(i, 10),
            adapter=ADAPTERS[i % len(ADAPTERS)],
            json_schema=json.dumps(case.schema) if i % 4 else None,
            max_tokens=18,
            ignore_eos=False,
            **way,
        )
        for i, (case, way) in enumerate(zip(cases, ways(len(cases)), strict=True))
    ]
    own = check(make_engine, *requests, **ROOM)
    assert accepted(own) > len(requests) / 2


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 2},
        {"frequency_penalty": 0.4, "temperature": 0.9, "seed": 5},
        {"prompt_logprobs": 1},
        {"min_tokens": 9},
    ],
    ids=str,
)
def test_beside_a_request_that_needs_the_host(
    make_engine: MakeEngine, options: dict[str, Any]
) -> None:
    own = {"json_schema": SCHEMA} if "logprobs" in options else {}
    check(
        make_engine,
        request("host", COPIED + prompt(1, 20), max_tokens=20, **own, **options),
        request("plain", COPIED + prompt(2, 20), json_schema=SCHEMA, max_tokens=30),
        **ROOM,
    )


def test_preemption_and_limits_inside_forced_text(make_engine: MakeEngine) -> None:
    requests = [
        request(str(i), prompt(i, 290 + i), json_schema=SCHEMA, max_tokens=3 + 8 * i)
        for i in range(4)
    ]
    config = {"arena_bytes": 60 * 2048 * 4, "prefix_cache": False, "max_running": 3}
    check(make_engine, *requests, **config)


def test_tokens_that_are_not_sure_are_mended(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(str(i), COPIED + prompt(i, 9), json_schema=SCHEMA if i % 2 else None, max_tokens=20,
                temperature=1.4, top_p=0.97, seed=i)
        for i in range(4)
    ]  # fmt: skip
    plain = run(ready(make_engine()), *requests)
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    monkeypatch.setattr("engine.drafts.speculation.propose", planted(plain))
    engine, _ = ahead(make_engine, **ROOM)
    got = run(engine, *requests, check=True)
    for name, expected in plain.items():
        same(got[name], expected)


@pytest.mark.parametrize("way", ["masks_behind", "behind"])
def test_a_mask_that_fails_among_drafts_ends_its_own_request(
    make_engine: MakeEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = request("other", prompt(2, 9), json_schema=SCHEMA, max_tokens=30)
    wanted = run(ready(make_engine()), other)["other"]
    engine, _ = ahead(make_engine, **ROOM)
    real = getattr(Matcher, way)

    def fails(self: Matcher, *args: Any) -> Any:
        sequence = next(s for s, m in engine._grammars._matchers.items() if m is self)
        if sequence.request.request_id == "hurt":
            raise RuntimeError("a defect")
        return real(self, *args)

    monkeypatch.setattr(Matcher, way, fails)
    if way == "masks_behind":  # as of drafts that are not from a walk
        monkeypatch.setattr(Matcher, "masks_ahead", lambda *_: None)
    got = run(engine, other, request("hurt", prompt(1, 9), json_schema=SCHEMA, max_tokens=30))
    assert got["hurt"].finish_reason == FinishReason.ERROR
    same(got["other"], wanted)


def test_a_crowd_without_forced_text_is_launched_as_without_drafts(make_engine: MakeEngine) -> None:
    requests = [
        request(str(i), prompt(i % 5, 5), regex="[a-z]{20,}", max_tokens=12) for i in range(25)
    ]
    launches = []
    for is_on in (False, True):
        config = {"max_running": 32, "max_step_tokens": 256, "prefix_cache": False}
        engine = ready(make_engine(speculation=is_on, **config))
        engine._speculation.costs = GPU
        counted = AheadRunner(engine)
        # The grammar is there from now on.
        run(engine, replace(requests[0], request_id="first", speculation=False))
        counted.counts = dict.fromkeys(counted.counts, 0)
        run(engine, *requests)
        assert sum(counts.drafted for counts in engine.stats().drafts.values()) == 0
        launches.append(counted.counts)
    assert launches[0] == launches[1]
    assert launches[1]["known"] <= 2


def test_no_guesses_while_another_step_is_in_flight(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other step is launched ahead, where guesses would follow from placeholders."""
    own = request("a", prompt(1, 9), max_tokens=30)
    plain = run(ready(make_engine()), own)
    monkeypatch.setattr("engine.drafts.speculation.propose", planted(plain))
    engine, _ = ahead(make_engine, **ROOM)
    speculation, turns = engine._speculation, itertools.cycle((True, False))
    propose: Any = speculation.propose
    drafted: dict[bool, int] = {False: 0, True: 0}
    steps: Counter[bool] = Counter()

    def counted(step: Any, *, is_ahead: bool) -> None:
        propose(step, is_ahead=is_ahead)
        steps[is_ahead] += 1
        drafted[is_ahead] += sum(len(row.drafts) for row in step.rows)

    monkeypatch.setattr(speculation, "propose", counted)
    monkeypatch.setattr(speculation, "waits", lambda step: next(turns))
    same(run(engine, own, check=True)["a"], plain["a"])
    assert min(steps.values()) > 2
    assert drafted[True] == 0 < drafted[False]


def test_wrong_drafts_are_given_up(make_engine: MakeEngine) -> None:
    """Then steps run ahead as without drafts, but for one in 64."""
    engine, counted = ahead(make_engine, **ROOM)
    run(engine, request("a", prompt(1, 9), max_tokens=200, temperature=2.0, seed=1))
    counts = counted.counts
    assert counts["known"] < 24
    assert counts["unread"] + counts["same"] > 160


@pytest.mark.parametrize("adapter", [None, "all-4", "dora", "ends"])
def test_drafts_are_rows_of_a_decode_graph(
    make_engine: MakeEngine, adapter: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU's own runner, greedy and drawn; "ends" takes no graph."""
    options = {"adapter": adapter, "max_tokens": 7}
    requests = [
        request("greedy", COPIED + prompt(1, 6), json_schema=SCHEMA, **options),
        request("drawn", prompt(2, 15), temperature=1.0, seed=2, **options),
    ]
    wanted = run(ready(make_engine()), *requests)
    monkeypatch.setattr("engine.drafts.speculation.propose", planted(wanted))
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    config = {"device": device, "dtype": "float32", "use_triton": True, "max_running": 12}
    engine = ready(make_engine(speculation=True, **config))
    got = run(engine, *requests, check=True)
    for name, expected in wanted.items():
        same(got[name], expected)
    assert accepted(got) > 2
