"""Steps with grammars are launched before their masks are known, and before any token is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import Engine, FinishReason, Request
from engine.execution.gpu_runner import GpuRunner
from engine.sampling.grammar import Matcher
from tests.engine.conftest import MakeEngine, Result, prompt, request, run
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.sampling.test_grammar import INVOICE, NESTED, SCHEMAS
from tests.engine.test_failures import break_for_one

pytest.importorskip("outlines")  # GPU machines do not have it

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

ARRAY = '{"type": "array", "items": {"type": "integer"}, "minItems": 9}'


def ready(engine: Engine) -> Engine:
    engine.prepare_grammars().result(300)
    return engine


def ask(count: int, max_tokens: int) -> list[Request]:
    """Greedy and drawn requests with and without a grammar, some with an adapter."""
    ways: list[dict[str, Any]] = [
        {"json_schema": json.dumps(INVOICE)},
        {"json_schema": json.dumps(NESTED), "temperature": 1.0, "seed": 5},
        {},
        {"json_schema": json.dumps(SCHEMAS["array"]), "temperature": 1.3, "seed": 6, "top_p": 0.9},
        {"json_schema": ARRAY, "temperature": 0.9, "seed": 7, "top_k": 9, "n": 2},
        {"temperature": 0.7, "seed": 8},
    ]
    adapters = [None, "all-4", "dora"]
    return [
        request(
            str(i),
            prompt(i, 5 + i % 7),
            adapter=adapters[i % 3],
            max_tokens=max_tokens + i % 5,
            ignore_eos=False,
            **ways[i % len(ways)],
        )
        for i in range(count)
    ]


def same(got: dict[str, Result], wanted: dict[str, Result]) -> None:
    assert got.keys() == wanted.keys()
    for name, result in wanted.items():
        assert got[name].token_ids == result.token_ids, name
        assert got[name].finish_reason == result.finish_reason, name


def test_masks_made_while_the_step_runs_are_those_made_before(make_engine: MakeEngine) -> None:
    requests = ask(24, 30)
    wanted = run(ready(make_engine()), *requests)
    for config in ({}, {"max_running": 3, "arena_bytes": 60 * 2048 * 4, "prefix_cache": False}):
        engine = ready(make_engine(**config))
        ahead = AheadRunner(engine)
        same(run(engine, *requests, check=True), wanted)
        assert ahead.counts["unread"] + ahead.counts["same"] > 4 * ahead.counts["known"]


def test_a_wrong_guess_beside_masks_is_taken_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that went on from it is dropped before it has its masks."""
    requests = ask(12, 16)
    wanted = run(ready(make_engine()), *requests)
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    engine = ready(make_engine())
    AheadRunner(engine)
    same(run(engine, *requests, check=True), wanted)


def test_a_mask_that_fails_ends_its_own_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ready(make_engine())
    AheadRunner(engine)
    others = [each for each in ask(6, 12) if each.grammar is None]
    wanted = run(ready(make_engine()), *others)
    break_for_one(Matcher, "fill_mask", lambda self, row: True)(monkeypatch, engine)
    got = run(engine, *others, request("hurt", prompt(1, 9), json_schema=ARRAY, max_tokens=8))
    hurt = got.pop("hurt")
    assert hurt.finish_reason == FinishReason.ERROR and hurt.token_ids == []
    same(got, wanted)


def test_a_schema_runs_ahead_on_the_gpu_runner(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graph by graph; the host chooses no token, and each pass is launched before its masks."""
    requests = [each for each in ask(5, 5) if each.n == 1]
    wanted = run(ready(make_engine()), *requests)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    engine = ready(make_engine(device=device, dtype="float32", use_triton=True, max_running=4))
    order: list[str] = []

    def noted(owner: type, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def spy(*args: Any) -> Any:
            order.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, spy)

    noted(GpuRunner, "_run")
    noted(GpuRunner, "_choose_masked")
    noted(Matcher, "accept")
    monkeypatch.setattr(GpuRunner, "run", None)  # whose logits the host reads
    same(run(engine, *requests, check=True), wanted)
    where = [i for i, name in enumerate(order) if name == "_choose_masked"]
    assert len(where) > 3
    assert any(order[i - 1] == "accept" for i in where), "no pass was launched ahead of a token"
