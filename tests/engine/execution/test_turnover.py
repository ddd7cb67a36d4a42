"""Crowds with an adapter each, of which the arena holds few: what moves while steps run ahead.

On a card thousands of steps in a minute, also under compute-sanitizer; elsewhere over the CPU's
decoder, since Triton's interpreter would take too long.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from engine import FinishReason, Request
from engine.execution.mixed_graphs import MAX_PROMPTS
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request
from tests.engine.execution.ahead_runner import AheadRunner

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

KINDS = ["ko-1", "layer-1", "qv-16", "all-4", "all-64", "patterns"]
NUM_DIGESTS = 200  # of each kind
LENGTHS = [2, 8, 17, 40]


def crowd(choose: random.Random, number: int) -> list[Request]:
    """More prompts than a graph has, most of adapters that nobody else has."""
    requests = []
    for i in range(MAX_PROMPTS + choose.randrange(2, 60)):
        length, kind = choose.choice(LENGTHS), choose.choice([*KINDS, None])
        requests.append(
            request(
                f"{number}.{i}.{kind}",
                prompt(length, length),
                adapter=kind and f"{kind}/{choose.randrange(NUM_DIGESTS)}",
                max_tokens=choose.choice([1, 3, 6]),
            )
        )
    return requests


def test_tokens_are_the_oracles(
    make_engine: MakeEngine, oracle: Oracle, adapters: dict[str, Path]
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    room = {"max_running": 96, "max_step_tokens": 256}
    memory = {"arena_bytes": 6 << 20, "host_cache_bytes": 4 << 20}
    engine = make_engine(device=device, dtype="float32", **room, **memory)
    if device == "cpu":
        AheadRunner(engine)
    for kind in KINDS:
        for i in range(NUM_DIGESTS):
            engine.register_adapter(f"{kind}/{i}", adapters[kind])
    choose = random.Random(4)
    crowds = 12 if device == "cpu" else 40
    waiting = [each for number in range(crowds) for each in crowd(choose, number)]
    asked = {each.request_id: each for each in waiting}
    results: dict[str, Result] = {}
    while waiting or engine.has_work():
        # All at once, a few, or the next when most of those before have gone.
        if waiting and (engine.stats().running < 30 or choose.random() < 0.1):
            number = choose.choice([1, 15, 77])
            for each in waiting[:number]:
                engine.add(each)
                results[each.request_id] = Result()
            del waiting[:number]
        if results and choose.random() < 0.02:
            engine.cancel(choose.choice(list(results)))
        for output in engine.step():
            results[output.request_id].add(output)
    used = {part.digest for each in asked.values() for part in each.adapters}
    assert len(engine.stats().resident_digests) < 0.75 * len(used), "hardly anybody had to leave"
    for name, result in results.items():
        if result.finish_reason != FinishReason.CANCELLED:
            assert len(result.token_ids) == asked[name].sampling.max_tokens
        kind = name.split(".")[2]
        expected = oracle.generate(list(asked[name].token_ids), 6, None if kind == "None" else kind)
        assert result.token_ids == expected[: len(result.token_ids)], name
