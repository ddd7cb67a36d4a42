"""The sampler against Hugging Face's processors and a slow reference written out by definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import FinishReason, Request, SamplingParams
from engine.sampling.gumbel import gumbel_noise, token_codes
from engine.sampling.sampler import Sampler, _draw, _Parameters
from engine.sequence import Sequence
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run

VOCAB = 1200  # more than the sampler looks at to begin with
NUM_DRAWS = 5000
CPU = torch.device("cpu")
CODES = token_codes(VOCAB, CPU)


def keys(count: int) -> torch.Tensor:
    """[count, 1] odd."""
    generator = torch.Generator().manual_seed(9)
    return torch.randint(-(1 << 62), 1 << 62, (count, 1), generator=generator) * 2 + 1


def hugging_face(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[V] -> the probabilities that `generate` would draw from."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), scores.unsqueeze(0))[0].softmax(-1)


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0], ids=["flat", "medium", "peaked"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_k": 700},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"min_p": 0.2},
        {"min_p": 0.001},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8},
        {"temperature": 0.6, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 600, "top_p": 0.99, "min_p": 0.01, "temperature": 2.5},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_hugging_faces_distribution(
    fields: dict[str, Any], spread: float
) -> None:
    params = SamplingParams(**fields)
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * spread
    columns = _Parameters([params] * NUM_DRAWS, VOCAB, CPU)
    tokens, _ = _draw(scores.expand(NUM_DRAWS, -1), columns, keys(NUM_DRAWS), CODES, VOCAB)
    found = torch.bincount(tokens, minlength=VOCAB).double()
    wanted = hugging_face(scores, params).double() * NUM_DRAWS
    assert not found[wanted == 0].any()
    assert ((found - wanted).abs() <= 5 * wanted.sqrt() + 3).all()
    common = wanted >= 5
    square = ((found - wanted) ** 2 / wanted)[common].sum()
    assert square <= common.sum() + 5 * (2 * common.sum()).sqrt()


@pytest.mark.parametrize("fields", [{"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 3, "top_p": 0.7}])
def test_few_candidates_are_enough_or_say_so(fields: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(200, VOCAB, generator=generator) * torch.linspace(0.1, 6, 200)[:, None]
    columns = _Parameters([SamplingParams(**fields)] * 200, VOCAB, CPU)
    right, _ = _draw(scores, columns, keys(200), CODES, VOCAB)
    few, sure = _draw(scores, columns, keys(200), CODES, 64)
    assert sure is not None and sure.any()
    assert torch.equal(few[sure], right[sure])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 40},
        pytest.param({"top_p": 0.9}, marks=pytest.mark.long),
        pytest.param({"min_p": 0.01}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_logits_that_are_rounded_otherwise_give_the_same_tokens(fields: dict[str, Any]) -> None:
    """By the cumulative distribution, ten of these would differ, or by its order of size."""
    count, vocab_size = 1000, 20_000
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(count, vocab_size, generator=generator) * 2
    rounded = scores + 5e-6 * torch.randn(count, vocab_size, generator=generator)
    columns = _Parameters([SamplingParams(**fields)] * count, vocab_size, CPU)
    codes = token_codes(vocab_size, CPU)
    drawn, _ = _draw(scores, columns, keys(count), codes, vocab_size)
    again, _ = _draw(rounded, columns, keys(count), codes, vocab_size)
    assert torch.equal(drawn, again)
    assert len(drawn.unique()) > count / 20


def test_rows_are_drawn_alike_alone_and_beside_others() -> None:
    """Whole ones and cut ones, in one batch and each by itself."""
    fields = [{}, {"top_p": 0.7}, {"temperature": 2.0}, {"top_k": 9}, {"min_p": 0.05}, {}]
    params = [SamplingParams(**own) for own in fields]
    scores = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    together, _ = _draw(scores, _Parameters(params, VOCAB, CPU), keys(6), CODES, VOCAB)
    for i, own in enumerate(params):
        row = slice(i, i + 1)
        alone, _ = _draw(scores[row], _Parameters([own], VOCAB, CPU), keys(6)[row], CODES, VOCAB)
        assert alone[0] == together[i]


def test_noise_is_gumbels_and_each_tokens_own() -> None:
    noise = gumbel_noise(keys(4000), CODES).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.577216, abs=0.003)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.01)
    assert (noise.mean(0) - 0.577216).abs().max() < 0.11  # of each token over the keys
    for one, other in [(noise, noise.roll(1, 0)), (noise, noise.roll(1, 1))]:
        both = torch.stack((one.flatten(), other.flatten()))
        assert abs(float(both.corrcoef()[0, 1])) < 0.003


def test_penalty_and_bias_are_hugging_faces() -> None:
    prompt_ids, generated = [5, 9, 9], [7, 5]
    params = SamplingParams(repetition_penalty=1.7, logit_bias={3: 2.5, 9: -4.0})
    sequence = Sequence(Request(request_id="r", token_ids=prompt_ids, sampling=params), 0)
    sampler = Sampler(vocab_size=20, device="cpu")
    sampler.add(sequence)
    for token_id in generated:
        forced = torch.full((1, 20), -50.0)
        forced[0, token_id] = 200.0
        sampler.choose(forced, [sequence], None)
        sequence.token_ids.append(token_id)
    scores = torch.randn(1, 20, generator=torch.Generator().manual_seed(1)) * 3
    processors = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(1.7),
        SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -4.0]]),
    ])  # fmt: skip
    wanted = processors(torch.tensor([prompt_ids + generated]), scores.clone())
    sampler.adjust(scores, 0, sequence)
    torch.testing.assert_close(scores, wanted)


def slow(oracle: Oracle, token_ids: list[int], params: SamplingParams, stop: set[int]) -> list[int]:
    """Greedy tokens, every adjustment by its definition, one number at a time."""
    generated: list[int] = []
    while len(generated) < (params.max_tokens or 0):
        with oracle._model.disable_adapter(), torch.no_grad():
            logits = oracle._model(torch.tensor([token_ids + generated])).logits[0, -1].tolist()
        counts, seen = Counter(generated), {*token_ids, *generated}
        for token_id, value in enumerate(logits):
            if token_id in seen:
                value = (
                    value * params.repetition_penalty
                    if value < 0
                    else value / (params.repetition_penalty)
                )
            value -= params.frequency_penalty * counts[token_id]
            value -= params.presence_penalty * (counts[token_id] > 0)
            value += params.logit_bias.get(token_id, 0.0)
            if token_id in stop and len(generated) < params.min_tokens:
                value = float("-inf")
            logits[token_id] = value
        best = max(range(len(logits)), key=logits.__getitem__)
        if best in stop:
            return generated
        generated.append(best)
    return generated


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -1.0, "presence_penalty": -0.5},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"logit_bias": {11: 6.0, 12: 5.5, 256: 4.0}, "frequency_penalty": 1.0},
        {"min_tokens": 9, "logit_bias": {256: 9.0}, "ignore_eos": False},
        {"min_tokens": 5, "stop_token_ids": (7, 19), "logit_bias": {7: 8.0, 19: 8.0}},
    ],
    ids=str,
)
def test_adjusted_tokens_equal_a_slow_reference(
    make_engine: MakeEngine, oracle: Oracle, fields: dict[str, Any]
) -> None:
    """Beside others, so that each row has its own adjustments."""
    tokens = prompt(6, 14)
    made = request("r", tokens, max_tokens=16, **fields)
    stop = {*made.sampling.stop_token_ids, *(() if made.sampling.ignore_eos else (256,))}
    beside = [
        request("other", prompt(7, 20), max_tokens=20, temperature=1.0, presence_penalty=1.0),
        request("plain", tokens, max_tokens=16),
    ]
    results = run(make_engine(max_step_tokens=20), beside[0], made, beside[1])
    assert results["r"].token_ids == slow(oracle, tokens, made.sampling, stop)
    assert results["plain"].token_ids == oracle.generate(tokens, 16)
    if len(results["r"].token_ids) < 16:
        assert results["r"].finish_reason == FinishReason.STOP


def test_penalties_and_seeds_survive_preemption(make_engine: MakeEngine) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.1, "seed": 3, "frequency_penalty": 0.8, "repetition_penalty": 1.3,
        "logprobs": 2, "max_tokens": 80,
    }  # fmt: skip
    alone = run(make_engine(), request("r", prompt(3, 40), **fields))["r"]
    engine = make_engine(arena_bytes=60 * 2048 * 4)
    crowd = [request(f"o{i}", prompt(i, 140), max_tokens=90) for i in range(6)]
    crowded = run(engine, *crowd, request("r", prompt(3, 40), **fields), check=True)["r"]
    assert engine.stats().num_preemptions > 0
    assert crowded.token_ids == alone.token_ids
    for one, other in zip(alone.logprobs, crowded.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
