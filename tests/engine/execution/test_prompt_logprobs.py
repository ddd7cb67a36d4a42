"""Log-probabilities of prompts are Hugging Face's, whatever else the engine is doing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine import AdapterOverflow, Engine, EngineConfig, FinishReason, Priority, RequestError
from engine.execution import prompt_scores
from engine.request import TokenLogprob
from tests.engine.conftest import (
    ADAPTERS,
    MakeEngine,
    Oracle,
    Result,
    prompt,
    request,
    run,
    save_model,
)
from tests.engine.execution.ahead_runner import AheadRunner
from tests.engine.test_failures import scale_tensors

EVERYTHING = [None, *ADAPTERS]
PAGE_BYTES = 2048 * 4


def assert_scored(
    got: list[TokenLogprob] | None, tokens: list[int], expected: torch.Tensor, num_top: int
) -> None:
    """`got` are the log-probabilities of tokens[1:], of `expected` [T, V]."""
    assert got is not None
    assert [entry.token_id for entry in got] == tokens[1:]
    for entry, row in zip(got, expected, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        own = row[entry.token_id]
        assert (row > own + 1e-4).sum() < (entry.rank or 0) <= (row > own - 1e-4).sum()
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(num_top).values.tolist(), abs=1e-4
        )
        for token_id, value in entry.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)


@pytest.mark.parametrize("block_bytes", [1 << 25, 3 * 4 * 257], ids=["one-block", "blocks-of-3"])
def test_every_adapter_in_chunks_beside_others(
    make_engine: MakeEngine,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
) -> None:
    """Half of the requests ask for them; nobody's tokens are others for it."""
    monkeypatch.setattr(prompt_scores, "_BLOCK_BYTES", block_bytes)
    engine = make_engine(max_step_tokens=24)
    cases = dict(zip(map(str, EVERYTHING), itertools.count(9, 3), strict=False))
    prompts = {name: prompt(70 + i, length) for i, (name, length) in enumerate(cases.items())}
    asked = []
    for i, name in enumerate(cases):
        adapter = None if name == "None" else name
        fields = {"prompt_logprobs": i % 4, "logprobs": 1 if i % 3 else None}
        asked.append(request(name, prompts[name], adapter=adapter, max_tokens=4, **fields))
        asked.append(request(f"{name} plain", prompts[name], adapter=adapter, max_tokens=4))
    results = run(engine, *asked, check=True)
    for i, name in enumerate(cases):
        adapter = None if name == "None" else name
        expected = oracle.logprobs(prompts[name], adapter)
        assert_scored(results[name].prompt_logprobs, prompts[name], expected, i % 4)
        for each in (name, f"{name} plain"):
            assert results[each].token_ids == oracle.generate(prompts[name], 4, adapter)
        assert results[f"{name} plain"].prompt_logprobs is None


def test_what_is_cached_is_computed_again(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    tokens = prompt(1, 70)
    engine.pin_prefix(tokens[:32], adapters=request("", [1], adapter="all-4").adapters)
    run(engine, request("before", tokens, adapter="all-4", max_tokens=3))
    scored = request("r", tokens, adapter="all-4", max_tokens=3, prompt_logprobs=2)
    after = request("after", tokens, adapter="all-4", max_tokens=3)
    results = run(engine, scored, check=True) | run(engine, after)
    got, plain = results["r"], results["after"]
    assert got.last is not None and got.last.num_cached_tokens == 0
    assert plain.last is not None and plain.last.num_cached_tokens == 64
    assert_scored(got.prompt_logprobs, tokens, oracle.logprobs(tokens, "all-4"), 2)
    assert got.token_ids == plain.token_ids == oracle.generate(tokens, 3, "all-4")


def test_who_is_preempted_keeps_what_is_known(make_engine: MakeEngine, oracle: Oracle) -> None:
    """An interactive request takes the only seat in the middle of the prompt, again and again."""
    engine = make_engine(max_running=1, max_step_tokens=20)
    tokens = prompt(2, 130)
    asked = request("r", tokens, max_tokens=3, prompt_logprobs=1, priority=Priority.BATCH)
    engine.add(asked)
    result = Result()
    for number in range(4):
        for _ in range(4):
            for output in engine.step():
                if output.request_id == "r":
                    result.add(output)
        engine.add(request(f"other {number}", prompt(number, 5), max_tokens=2))
    while engine.has_work():
        for output in engine.step():
            if output.request_id == "r":
                result.add(output)
        engine.check_integrity()
    assert engine.stats().num_preemptions >= 2
    assert_scored(result.prompt_logprobs, tokens, oracle.logprobs(tokens), 1)
    assert result.token_ids == oracle.generate(tokens, 3)


def test_pages_run_short(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES, max_step_tokens=64)
    prompts = [prompt(i, 90 + i) for i in range(12)]
    asked = [request(str(i), p, max_tokens=40, prompt_logprobs=0) for i, p in enumerate(prompts)]
    results = run(engine, *asked, check=True)
    assert engine.stats().num_preemptions > 0
    for i, tokens in enumerate(prompts):
        assert_scored(results[str(i)].prompt_logprobs, tokens, oracle.logprobs(tokens), 0)
        assert results[str(i)].token_ids == oracle.generate(tokens, 40)


def test_several_continuations_are_told_once(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(max_step_tokens=16)
    tokens = prompt(3, 41)
    results = run(engine, request("r", tokens, n=3, max_tokens=2, prompt_logprobs=2), check=True)
    told = [results[name].prompt_logprobs for name in ("r", "r/1", "r/2")]
    [got] = [each for each in told if each is not None]
    assert_scored(got, tokens, oracle.logprobs(tokens), 2)
    assert all(results[name].token_ids == oracle.generate(tokens, 2) for name in results)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17])
def test_the_prompt_alone(make_engine: MakeEngine, oracle: Oracle, num_tokens: int) -> None:
    """max_tokens 0: the prompt is computed, and nothing is generated."""
    engine = make_engine()
    tokens = prompt(4, num_tokens)
    fields = {"max_tokens": 0, "prompt_logprobs": 1, "logprobs": 1}
    results = run(engine, request("r", tokens, **fields), request("plain", tokens, max_tokens=0))
    for got in results.values():
        assert got.last is not None and got.finish_reason == FinishReason.LENGTH
        assert (got.token_ids, got.logprobs, got.last.num_generated) == ([], [], 0)
        assert got.last.num_prompt_tokens == num_tokens
        assert got.last.end_logprob is None
    assert_scored(results["r"].prompt_logprobs, tokens, oracle.logprobs(tokens), 1)


def test_the_token_that_ends_an_answer_has_one(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    tokens = prompt(5, 9)
    first, *_ = oracle.generate(tokens, 1)
    fields = {"stop_token_ids": (first,), "logprobs": 1, "max_tokens": 3}
    got = run(engine, request("r", tokens, **fields))["r"]
    assert got.token_ids == [] and got.logprobs == []
    assert got.last is not None and got.last.end_logprob is not None
    assert got.last.end_logprob.token_id == first


def test_steps_launched_ahead(make_engine: MakeEngine, oracle: Oracle) -> None:
    """On a GPU tokens of one step are read after the next is launched; these are not."""
    engine = make_engine(max_step_tokens=24)
    run(engine, request("warm", prompt(5, 3), adapter="all-4", max_tokens=1))
    ahead = AheadRunner(engine)
    engine.add(request("plain", prompt(6, 10), adapter="all-4", max_tokens=30))
    plain, others = Result(), {}
    for step in range(200):
        if step in (3, 4, 9):
            tokens = prompt(step, 50)
            engine.add(request(str(step), tokens, max_tokens=5, prompt_logprobs=2))
            others[str(step)] = tokens
        for output in engine.step():
            if output.request_id == "plain":
                plain.add(output)
            elif output.prompt_logprobs is not None:
                tokens = others.pop(output.request_id)
                assert_scored(output.prompt_logprobs, tokens, oracle.logprobs(tokens), 2)
        engine.check_integrity()
    assert not others and ahead.counts["same"] > 0
    assert plain.token_ids == oracle.generate(prompt(6, 10), 30, "all-4")


def test_numbers_that_overflow(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path
) -> None:
    engine = make_engine(max_step_tokens=16)
    engine.register_adapter("loud", scale_tensors(adapters["all-4"], tmp_path / "loud", 1e18))
    tokens = prompt(7, 40)
    results = run(
        engine,
        request("loud", tokens, adapter="loud", max_tokens=2, prompt_logprobs=1),
        request("fine", tokens, adapter="all-4", max_tokens=2, prompt_logprobs=1),
        check=True,
    )
    assert isinstance(results["loud"].error, AdapterOverflow)
    assert results["loud"].prompt_logprobs is None
    assert_scored(results["fine"].prompt_logprobs, tokens, oracle.logprobs(tokens, "all-4"), 1)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_the_vocabulary_has(tmp_path: Path, name: str) -> None:
    base = save_model(tmp_path, vocab_size=8, eos_token_id=7, pad_token_id=7)
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=1 << 20))
    with pytest.raises(RequestError) as raised:
        engine.add(request("r", [1, 2], **{name: 9}))
    assert raised.value.param == name and "at most 8" in raised.value.message
    got = run(engine, request("r", [1, 2], max_tokens=1, **{name: 8}))["r"]
    assert got.error is None
    [entry] = got.logprobs or got.prompt_logprobs
    assert len(entry.top) == 8
    engine.close()
