"""The engine over its GPU runner: graphs, and steps launched before the last one's tokens are read.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import AdapterOverflow, Engine, FinishReason
from engine.execution import gpu_runner, mixed_graphs
from engine.execution.batch import Batch
from engine.execution.gpu_batch import ChunkBlocks
from engine.execution.gpu_runner import GpuRunner, Tokens
from engine.execution.lora_table import LoraScope
from engine.execution.mixed_graphs import MAX_PROMPTS, Shape, cut_blocks
from engine.sampling.sampler import Sampled
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run
from tests.engine.test_failures import scale_tensors
from tests.kernels import bounds

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu


def make_gpu_engine(make_engine: MakeEngine, **config: int) -> Engine:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    given = {"max_running": 4, **config}
    return make_engine(device=device, dtype="float32", use_triton=True, **given)


def test_mixed_batch_is_the_oracles(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_gpu_engine(make_engine)
    chosen = [None, "all-4", "patterns", "qv-16"]
    prompts = [prompt(i, 12 + i) for i in range(4)]  # two of them cross into a second page
    results = run(
        engine,
        *(
            request(str(i), tokens, adapter=adapter, max_tokens=5)
            for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True))
        ),
        check=True,
    )
    for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        assert results[str(i)].token_ids == oracle.generate(tokens, 5, adapter)
        assert results[str(i)].finish_reason == FinishReason.LENGTH


EXTENDED = ["dora", "dora-some", "bias", "bias-head", "ends", "embedding", "dora-embedding"]


@pytest.mark.long
def test_adapters_that_are_more_than_tiles(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Beside others in one batch, in prefill and decode; some change the vocabulary's ends, so
    that the steps take no graph. `test_scored_beside_others` has them too."""
    engine = make_gpu_engine(make_engine, max_running=10, max_step_tokens=40)
    chosen = [None, *EXTENDED, "all-4", "dora"]
    prompts = [prompt(40 + i, 6 + i) for i in range(len(chosen))]
    results = run(
        engine,
        *(
            request(str(i), tokens, adapter=adapter, max_tokens=3)
            for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True))
        ),
    )
    for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        assert results[str(i)].token_ids == oracle.generate(tokens, 3, adapter), adapter


def test_gains_and_biases_take_graphs(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_gpu_engine(make_engine, max_running=5, max_step_tokens=40)
    monkeypatch.setattr(GpuRunner, "_gpu_batch", None)  # what goes launch by launch
    chosen = [None, "dora", "bias", "all-4", "dora"]
    prompts = [prompt(60 + i, 6 + i) for i in range(len(chosen))]
    results = run(
        engine,
        *(
            request(str(i), tokens, adapter=adapter, max_tokens=3 + i % 2)
            for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True))
        ),
    )
    for i, (tokens, adapter) in enumerate(zip(prompts, chosen, strict=True)):
        assert results[str(i)].token_ids == oracle.generate(tokens, 3 + i % 2, adapter), adapter


@pytest.mark.parametrize("adapter", [None, "all-4"])
def test_steps_beyond_the_graphs_go_ahead_too(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, adapter: str | None
) -> None:
    """Launch by launch, the tokens are chosen on the device as well; decodes in such a step take
    the decode kernel."""
    monkeypatch.setattr(mixed_graphs, "BUCKETS", (4,))
    monkeypatch.setattr(gpu_runner, "_MANY_DECODES", 2)
    num_blocks = []

    def counted(batch: Batch) -> ChunkBlocks:
        blocks = cut(batch)
        num_blocks.append(len(blocks.context_lens))
        return blocks

    cut = gpu_runner._blocks
    monkeypatch.setattr(gpu_runner, "_blocks", counted)
    engine = make_gpu_engine(make_engine, max_running=5, max_step_tokens=40)
    ahead = 0
    early = [prompt(70 + i, 5 + i) for i in range(3)]
    late = [prompt(80, 45), prompt(81, 20)]
    for i, tokens in enumerate(early):
        engine.add(request(str(i), tokens, adapter=adapter, max_tokens=8))
    results = {}
    for step in range(40):
        if step == 2:
            for i, tokens in enumerate(late):
                engine.add(request(str(3 + i), tokens, adapter=adapter, max_tokens=3))
        for output in engine.step():
            results.setdefault(output.request_id, []).extend(output.token_ids)
        ahead += engine._in_flight is not None and engine._in_flight.tokens is not None
    for i, tokens in enumerate(early + late):
        count = 8 if i < 3 else 3
        assert results[str(i)] == oracle.generate(tokens, count, adapter), i
    assert num_blocks and ahead >= 8


def test_a_chunk_that_samples_nothing(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_gpu_engine(make_engine, max_step_tokens=12)
    tokens = prompt(7, 20)
    results = run(engine, request("r", tokens, adapter="all-4", max_tokens=2))
    assert results["r"].token_ids == oracle.generate(tokens, 2, "all-4")


def test_numbers_that_overflow_are_seen_on_the_device(
    make_engine: MakeEngine,
    oracle: Oracle,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    engine = make_gpu_engine(make_engine)
    engine.register_adapter("loud", scale_tensors(adapters["all-4"], tmp_path / "loud", 1e18))
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    results = run(
        engine,
        request("fine", prompt(1, 5), adapter="all-4", max_tokens=4),
        request("greedy", prompt(2, 5), adapter="loud", max_tokens=4),
        request("drawn", prompt(3, 5), adapter="loud", max_tokens=4, **drawn),
        check=True,
    )
    for name in ("greedy", "drawn"):
        assert isinstance(results[name].error, AdapterOverflow)
        assert results[name].token_ids == []
    assert results["fine"].token_ids == oracle.generate(prompt(1, 5), 4, "all-4")


def test_requests_end_while_the_next_step_runs(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_gpu_engine(make_engine)
    first, second = prompt(1, 4), prompt(2, 4)
    expected = oracle.generate(first, 6)
    stop = next(i for i in range(1, 6) if expected[i] not in expected[:i])
    engine.add(request("stops", first, max_tokens=6, stop_token_ids=(expected[stop],)))
    engine.add(request("cancelled", second, max_tokens=100))
    token_ids: dict[str, list[int]] = {"stops": [], "cancelled": []}
    reasons = {}
    num_steps = 0
    while engine.has_work():
        for output in engine.step():
            token_ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        engine.check_integrity()
        num_steps += 1
        if num_steps == 9:
            engine.cancel("cancelled")
    assert token_ids["stops"] == expected[:stop]
    assert reasons == {"stops": FinishReason.STOP, "cancelled": FinishReason.CANCELLED}
    num_got = len(token_ids["cancelled"])
    assert num_got >= 5
    assert token_ids["cancelled"] == oracle.generate(second, num_got)


def test_decodes_run_ahead_over_shared_prefixes(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Also when every page that is not read is kept by the prefix cache."""
    engine = make_gpu_engine(make_engine, arena_bytes=60 * 2048 * 4)
    for i in range(3):
        run(engine, request("fill", prompt(10 + i, 240), max_tokens=1))
    assert engine.stats().cached_pages > 40
    run(engine, request("0", prompt(1, 33), adapter="ko-1", max_tokens=2), check=True)
    second, other = (
        request(str(i), prompt(1, 33), adapter=adapter, max_tokens=20)
        for i, adapter in enumerate(["ko-1", None])
    )
    results = run(engine, second, other, check=True)
    for i, (adapter, num_cached) in enumerate([("ko-1", 32), (None, 0)]):
        last = results[str(i)].last
        assert last is not None and last.num_cached_tokens == num_cached
        assert results[str(i)].token_ids == oracle.generate(prompt(1, 33), 20, adapter)


def test_prompts_in_chunks_beside_decodes(make_engine: MakeEngine, oracle: Oracle) -> None:
    """Prompts longer than a block, between decodes with and without adapters."""
    engine = make_gpu_engine(make_engine, max_step_tokens=48, max_running=5)
    lengths, chosen = [5, 75, 3, 33, 40], [None, "all-4", "qv-16", None, "all-4"]
    results: dict[str, Result] = {}
    for i, (length, adapter) in enumerate(zip(lengths, chosen, strict=True)):
        engine.add(request(str(i), prompt(i, length), adapter=adapter, max_tokens=6))
        results[str(i)] = Result()
        for _ in range(2):
            for output in engine.step():
                results[output.request_id].add(output)
    for request_id, result in run(engine, check=True).items():
        results[request_id].token_ids += result.token_ids
    for i, (length, adapter) in enumerate(zip(lengths, chosen, strict=True)):
        assert results[str(i)].token_ids == oracle.generate(prompt(i, length), 6, adapter)


@pytest.mark.long
def test_more_prompts_than_a_graph_has(
    make_engine: MakeEngine, oracle: Oracle, adapters: dict[str, Path]
) -> None:
    """Each with an adapter of its own, on its way to pages that others have to leave; they are
    launched one by one, before the tokens of the decodes beside them are read."""
    few, many = 4, MAX_PROMPTS + 2
    room = few + (2 + 3) * many // 2 - 2  # of the last prompt's three tokens one
    engine = make_gpu_engine(make_engine, max_running=few + many, max_step_tokens=room)
    kinds = ["ko-1", "layer-1", "qv-16"]
    names = [f"{kinds[i % 3]}/{i}" for i in range(few + many)]
    for name in names:
        engine.register_adapter(name, adapters[name.split("/")[0]])
    prompts = [prompt(i, 2 + i % 2) for i in range(few + many)]
    requests = [
        request(name, tokens, adapter=name, max_tokens=3)
        for name, tokens in zip(names, prompts, strict=True)
    ]
    run(engine, *(request(name, [1], adapter=name, max_tokens=1) for name in names[few:]))
    results: dict[str, Result] = {name: Result() for name in names}
    for group in (requests[:few], requests[few:]):
        for each in group:
            engine.add(each)
        for output in engine.step():
            results[output.request_id].add(output)
    for name, result in run(engine, check=True).items():
        results[name].token_ids += result.token_ids
    for name, tokens in zip(names, prompts, strict=True):
        assert results[name].token_ids == oracle.generate(tokens, 3, name.split("/")[0]), name


def test_a_prompt_after_a_crowd_of_decodes(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decodes are one block to the prefill kernel, which has nothing to compute of it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        bounds.watch(monkeypatch)
    engine = make_gpu_engine(make_engine, max_running=80)
    for i in range(78):
        engine.add(request(f"{i}", prompt(i % 3, 1), max_tokens=2))
    engine.step()
    results = run(engine, request("last", prompt(9, 7), max_tokens=1))
    assert results["last"].token_ids == oracle.generate(prompt(9, 7), 1)
    for i in range(78):
        assert results[str(i)].token_ids[-1:] == oracle.generate(prompt(i % 3, 1), 2)[1:]


def test_a_smaller_graph_may_be_recorded_after_a_larger_step(make_engine: MakeEngine) -> None:
    """Recording runs the pass over buffers that a larger bucket has filled."""
    engine = make_gpu_engine(make_engine, max_step_tokens=64)
    run(engine, *(request(str(i), prompt(i, 30), max_tokens=1) for i in range(2)))
    mixed = engine._runner._gpu._mixed
    size = mixed.sizes[0]
    assert size < 60, "the prompts were a larger step"
    mixed._clear()
    mixed._run(mixed._batch(size, LoraScope.NONE), mixed._shape(size))


def test_blocks_of_prompts_between_decodes() -> None:
    lengths, contexts = np.array([1, 70, 1, 1, 2, 33, 1], np.int32), np.arange(100, 107)
    start, context, row = cut_blocks(lengths, contexts.astype(np.int32))
    assert start.tolist() == [0, 1, 33, 65, 71, 73, 75, 107, 108]
    assert context.tolist() == [0, 63 + 0, 95, 101, 0, 104, 104, 105]
    assert row.tolist() == [0, 1, 1, 1, 0, 4, 5, 5]


def test_there_is_room_for_every_block() -> None:
    choose = random.Random(0)
    for size, kinds in itertools.product((16, 64, 512), ([1, 2], [2], [1, 2, 3], [1, 33, 34])):
        for _ in range(100):
            lengths = []
            while sum(lengths) < size:
                lengths.append(min(choose.choice(kinds), size - sum(lengths)))
            rows = np.array(lengths, np.int32)
            if (rows > 1).sum() <= MAX_PROMPTS:
                _, contexts, _ = cut_blocks(rows, rows)
                assert len(contexts) <= Shape(tokens=size, rows=size).blocks


def test_drawn_tokens_are_the_cpus(make_engine: MakeEngine) -> None:
    """Whatever the distribution is cut to, beside greedy rows, and before they are read."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9},
        {"temperature": 1.3, "seed": 3, "top_k": 20, "min_p": 0.02},
    ]
    requests = [
        request(str(i), prompt(i, 5 + i), adapter="all-4" if i % 2 else None, max_tokens=7, **way)
        for i, way in enumerate(ways)
    ]
    wanted = run(make_engine(), *requests)
    engine = make_gpu_engine(make_engine)
    got = run(engine, *requests, check=True)
    assert {i: r.token_ids for i, r in got.items()} == {i: r.token_ids for i, r in wanted.items()}


def test_a_guess_that_was_wrong_is_taken_back(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the most likely tokens hold too little, the token is drawn again from all."""
    requests = [
        request("flat", prompt(1, 5), max_tokens=6, temperature=2.0, seed=4, top_p=0.95),
        request("greedy", prompt(2, 5), max_tokens=6),
    ]
    wanted = run(make_engine(), *requests)
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    wrong = []
    sampled = Tokens.sampled

    def spy(tokens: Tokens) -> list[Sampled]:
        out = sampled(tokens)
        wrong.append(tokens.were_wrong)
        return out

    monkeypatch.setattr(Tokens, "sampled", spy)
    got = run(make_gpu_engine(make_engine), *requests, check=True)
    assert any(wrong)
    assert {i: r.token_ids for i, r in got.items()} == {i: r.token_ids for i, r in wanted.items()}


@pytest.mark.long
def test_continuations_share_a_prompt_and_run_ahead(make_engine: MakeEngine) -> None:
    engine = make_gpu_engine(make_engine)
    drawn = {"temperature": 1.2, "max_tokens": 4, "adapter": "qv-16"}
    results = run(engine, request("r", prompt(3, 20), n=3, seed=40, **drawn), check=True)
    alone = run(engine, *(request(f"{i}", prompt(3, 20), seed=40 + i, **drawn) for i in range(3)))
    for i, name in enumerate(["r", "r/1", "r/2"]):
        assert results[name].token_ids == alone[str(i)].token_ids
    assert len({tuple(result.token_ids) for result in results.values()}) == 3
