"""Steps that are planned and launched before the tokens of the step before are read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine import Engine, FinishReason, Request, RequestOutput
from engine.adapters.tiles import TileMap
from engine.execution.lora_table import Entries, EntryBuffers, EntryCache
from engine.execution.uploads import upload
from tests.engine.conftest import MakeEngine, Oracle, name_of, prompt, request, run
from tests.engine.execution.ahead_runner import AheadRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Ways to ask, by what decides the tokens: logits alone, or something on the host.
WAYS: list[dict[str, Any]] = [
    {},
    {"stop": 1},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.8, "n": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 2},
    {"min_tokens": 3, "stop": 0},
]
NAMES = [None, "all-4", "qv-16", "dora", "ko-1"]


def ask(name: str, choose: random.Random, oracle: Oracle) -> Request:
    tokens = prompt(choose.randrange(5), choose.choice([3, 17, 30]))
    adapter, way = choose.choice(NAMES), dict(choose.choice(WAYS))
    stop = way.pop("stop", None)
    if stop is not None:
        way["stop_token_ids"] = (oracle.generate(tokens, 4, adapter)[stop],)
    return request(name, tokens, adapter=adapter, max_tokens=choose.choice([1, 4, 9]), **way)


class Game:
    """Requests that come and go at random; what each of their continuations got."""

    def __init__(self, engine: Engine, requests: list[Request], choose: random.Random) -> None:
        self.got: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cancelled: set[str] = set()
        waiting = list(requests)
        while waiting or engine.has_work():
            while waiting and choose.random() < 0.5:
                engine.add(waiting.pop(0))
            if choose.random() < 0.03:
                victim = choose.choice(requests).request_id
                self.cancelled.add(victim)
                engine.cancel(victim)
            for output in engine.step():
                self._note(output)
            engine.check_integrity()

    def _note(self, output: RequestOutput) -> None:
        name = name_of(output)
        assert output.error is None and name not in self.reasons
        assert all(token >= 0 for token in output.token_ids)
        self.got.setdefault(name, []).extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[name] = output.finish_reason


@pytest.mark.parametrize("seed", range(6))
def test_whoever_comes_and_goes_gets_the_tokens_of_running_alone(
    make_engine: MakeEngine, oracle: Oracle, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # drawn tokens are often not sure, and what went on from them is taken back
        monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    choose = random.Random(seed)
    engine = make_engine(
        arena_bytes=choose.choice([80, 120, 400]) * 2048 * 4,
        max_step_tokens=choose.choice([12, 40, 200]),
        max_running=choose.choice([3, 6, 9]),
        prefix_cache=choose.random() < 0.7,
    )
    ahead = AheadRunner(engine)
    requests = [ask(str(i), choose, oracle) for i in range(25)]
    game = Game(engine, requests, choose)
    assert ahead.counts["unread"] + ahead.counts["same"] > 0
    alone = make_engine()
    for each in requests:
        for name, result in run(alone, each).items():
            got = game.got.get(name, [])
            if game.reasons[name] == FinishReason.CANCELLED:
                assert each.request_id in game.cancelled
                assert got == result.token_ids[: len(got)]
            else:
                assert got == result.token_ids
                assert game.reasons[name] == result.finish_reason


def test_one_ends_and_another_begins_without_waiting_for_tokens(make_engine: MakeEngine) -> None:
    """Of all steps but the first, none is launched from tokens that the host has read."""
    engine = make_engine(max_running=2)
    ahead = AheadRunner(engine)
    lengths = [3, 7, 5, 6]
    results = run(
        engine, *(request(str(i), prompt(i, 4), max_tokens=n) for i, n in enumerate(lengths))
    )
    assert [len(results[str(i)].token_ids) for i in range(4)] == lengths
    assert ahead.counts["known"] == 1
    assert ahead.counts["unread"] >= 2


def test_a_prompt_begins_beside_unread_tokens(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    run(engine, request("load", prompt(3, 4), adapter="all-4", max_tokens=1))
    ahead = AheadRunner(engine)
    engine.add(request("first", prompt(1, 5), max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.add(request("second", prompt(2, 9), adapter="all-4", max_tokens=4))
    assert run(engine)["second"].token_ids == oracle.generate(prompt(2, 9), 4, "all-4")
    assert ahead.counts["known"] == 1
    assert ahead.counts["unread"] >= 2  # with the prompt, and without the one that ended


def test_a_step_that_is_taken_back_leaves_no_trace(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on from a token that was wrong, and held one that is chosen by those before."""
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    penalised = request("penalised", prompt(2, 9), max_tokens=10, frequency_penalty=0.4)
    wanted = run(make_engine(), penalised)["penalised"].token_ids
    for seed in range(6):
        engine = make_engine()
        AheadRunner(engine)
        engine.add(
            request("drawn", prompt(1, 5), max_tokens=10, temperature=1.5, top_p=0.97, seed=seed)
        )
        engine.step()
        assert run(engine, penalised)["penalised"].token_ids == wanted


def test_a_preempted_request_keeps_the_token_on_its_way(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine(arena_bytes=60 * 2048 * 4, prefix_cache=False, max_running=3)
    AheadRunner(engine)
    requests = [request(str(i), prompt(i, 300), max_tokens=30) for i in range(3)]
    results = run(engine, *requests, check=True)
    assert engine.stats().num_preemptions > 0
    for i in range(3):
        assert results[str(i)].token_ids == oracle.generate(prompt(i, 300), 30)


def tiles(first: int, count: int) -> TileMap:
    """Of one layer: `count` tiles for each projection, of offsets from `first` on."""
    offsets = first + np.arange(7 * count, dtype=np.int64).reshape(7, count)
    return TileMap(
        num_pages=1,
        tail_sub_pages=0,
        num_tiles=count,
        a_offset=offsets,
        b_offset=offsets + 1000,
        rows=np.full((7, count), 8, np.int32),
        scale=np.full((7, count), 0.5, np.float32),
    )


def test_entries_are_put_once_and_anew_when_tiles_or_room_change() -> None:
    known = {"a": tiles(0, 1), "b": tiles(100, 2), "c": tiles(200, 1)}
    cache = EntryCache(known.__getitem__)
    buffers = EntryBuffers(max_entries=28, device=torch.device("cpu"))

    def starts(*names: str) -> list[int]:
        keys = [((name, 1.0),) for name in names]
        found = buffers.starts(keys, cache.get(keys))
        assert found is not None
        for name, start in zip(names, found.tolist(), strict=True):
            expected = known[name].a_offset.ravel()
            end = start + expected.size
            assert buffers.a_offset[start:end].tolist() == expected.tolist()
            assert buffers.b_offset[start:end].tolist() == (expected + 1000).tolist()
            assert buffers.rows[start:end].eq(8).all()
            assert buffers.scale[start:end].eq(0.5).all()
        found_starts: list[int] = found.tolist()
        return found_starts

    assert starts("a") == [0]
    assert starts("b", "a") == [7, 0]
    known["a"] = tiles(300, 1)  # evicted, and back at other pages
    assert starts("a", "b") == [21, 7]
    assert starts("c", "a") == [0, 7]  # no room: from the front again
    keys = [((name, 1.0),) for name in "abc"]
    assert buffers.starts([*keys, (("b", 2.0),)], cache.get([*keys, (("b", 2.0),)])) is None


def test_an_engine_puts_an_adapters_entries_once(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    buffers, ends = engine._runner.entry_buffers, []
    for names in (["all-4"], ["qv-16", "all-4"], ["all-4"], ["qv-16"]):
        requests = [
            request(str(i), prompt(i, 5), adapter=n, max_tokens=3) for i, n in enumerate(names)
        ]
        results = run(engine, *requests)
        for i, name in enumerate(names):
            expected = oracle.generate(prompt(i, 5), len(results[str(i)].token_ids), name)
            assert results[str(i)].token_ids == expected
        ends.append(buffers._end)
    first, both = ends[:2]
    assert 0 < first < both
    assert ends == [first, both, both, both]


def test_a_blends_entries_carry_its_weights() -> None:
    own = Entries.of((("a", 2.0), ("b", -1.0)), [tiles(0, 1), tiles(100, 2)])
    assert own.num_tiles == 3
    assert own.scale.reshape(7, 3).tolist() == [[1.0, -0.5, -0.5]] * 7
    assert own.a_offset[:3].tolist() == [0, 100, 101]


def test_an_upload_keeps_every_array_apart() -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(3, dtype=np.int32),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.ones(1, np.float32),
    ]
    for array, tensor in zip(arrays, upload(arrays, DEVICE), strict=True):
        assert tensor.shape == array.shape
        assert tensor.tolist() == array.tolist()
