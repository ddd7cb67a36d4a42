"""Each sampling parameter against its definition, on small distributions."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from engine import Request, SamplingParams
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run

PROBS = [0.4, 0.3, 0.15, 0.1, 0.05]
AT_ONCE = 50
SHUFFLE = [3, 0, 4, 1, 2]  # token id of each rank


def logits(vocab_size: int = 5) -> torch.Tensor:
    row = torch.full((vocab_size,), -30.0)
    for rank, token_id in enumerate(SHUFFLE):
        row[token_id] = math.log(PROBS[rank])
    return row


def draw(count: int, vocab_size: int = 5, **sampling: Any) -> Counter[int]:
    """How often each rank is drawn, by requests with seeds of their own."""
    sampler = Sampler(vocab_size=vocab_size, device="cpu")
    sequences = []
    for seed in range(AT_ONCE):
        params = SamplingParams(seed=seed, **sampling)
        asked = Request(request_id=str(seed), token_ids=[0], sampling=params)
        sequences.append(Sequence(asked, 0))
        sampler.add(sequences[-1])
    rows = logits(vocab_size).expand(AT_ONCE, -1)
    found: Counter[int] = Counter()
    for _ in range(count // AT_ONCE):
        for sequence, sampled in zip(sequences, sampler.choose(rows, sequences, None), strict=True):
            sequence.token_ids.append(sampled.token_id)  # each token has a number of its own
            found[SHUFFLE.index(sampled.token_id)] += 1
    return found


def expected(kept: int, temperature: float = 1.0) -> list[float]:
    weights = [p ** (1 / temperature) for p in PROBS[:kept]]
    return [w / sum(weights) for w in weights] + [0.0] * (len(PROBS) - kept)


@pytest.mark.parametrize("vocab_size", [5, 3000], ids=["small", "beyond-candidates"])
@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_k": 50}, 5),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"top_p": 0.01}, 1),
        ({"min_p": 0.3}, 3),
        ({"top_k": 3, "top_p": 0.8}, 2),
        ({"top_k": 4, "min_p": 0.5}, 2),
        ({"temperature": 2.0}, 5),
        ({"temperature": 0.5, "top_k": 3}, 3),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(
    sampling: dict[str, Any], kept: int, vocab_size: int
) -> None:
    count = 1500
    found = draw(count, vocab_size, **sampling)
    for rank, share in enumerate(expected(kept, sampling.get("temperature", 1.0))):
        spread = 4.5 * math.sqrt(share * (1 - share) / count)
        assert abs(found[rank] / count - share) <= spread, (rank, found)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-9}])
def test_greedy(sampling: dict[str, Any]) -> None:
    assert draw(AT_ONCE, **sampling) == {0: AT_ONCE}


def adjusted(
    row: torch.Tensor, prompt_ids: list[int], generated: list[int], **sampling: Any
) -> Any:
    """The row after penalties and bias, for a request that has generated some tokens."""
    sampler = Sampler(vocab_size=len(row), device="cpu")
    params = SamplingParams(**sampling)
    sequence = Sequence(
        Request(request_id="r", token_ids=prompt_ids, sampling=params), 0, frozenset({4})
    )
    sampler.add(sequence)
    for token_id in generated:
        forced = torch.full((1, len(row)), -50.0)
        forced[0, token_id] = 50.0
        sampler.choose(forced, [sequence], None)
        sequence.token_ids.append(token_id)
    changed = row.clone().unsqueeze(0)
    sampler.adjust(changed, 0, sequence)
    return changed[0].tolist()


def test_penalties_follow_their_definitions() -> None:
    row = torch.tensor([2.0, -2.0, 1.0, 0.5, 0.0])
    got = adjusted(row, [0], [1, 1, 2], frequency_penalty=0.5, presence_penalty=0.25)
    assert got == pytest.approx([2.0, -2.0 - 1.0 - 0.25, 1.0 - 0.5 - 0.25, 0.5, 0.0])
    got = adjusted(row, [0], [1], repetition_penalty=2.0)
    assert got == pytest.approx([1.0, -4.0, 1.0, 0.5, 0.0])


def test_logit_bias_and_min_tokens() -> None:
    row = torch.zeros(5)
    got = adjusted(row, [0], [], logit_bias={1: 3.0, 2: -100.0}, min_tokens=2)
    assert got == [0.0, 3.0, -100.0, 0.0, -math.inf]
    assert adjusted(row, [0], [1, 1], min_tokens=2)[4] == 0.0


def test_numbers_of_other_libraries_are_numbers(make_engine: MakeEngine) -> None:
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6}
    got = run(
        make_engine(),
        request("own", [1, 2], seed=5, logit_bias={3: 0.5}, n=2, **drawn),
        request("other", [1, 2], seed=np.int64(5), logit_bias={3: Fraction(1, 2)}, n=2, **drawn),
    )
    assert got["own"].token_ids == got["other"].token_ids
    assert got["own/1"].token_ids == got["other/1"].token_ids


def test_a_seed_below_zero_is_a_seed_of_its_own(make_engine: MakeEngine) -> None:
    """Python's Random takes -1 and 1 for the same; continuations draw with the seed + i."""
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": -1, "max_tokens": 12}
    got = run(make_engine(), request("r", [1, 2], n=3, **drawn))
    assert len({tuple(result.token_ids) for result in got.values()}) == 3
    again = run(make_engine(), request("r", [1, 2], **drawn))
    assert again["r"].token_ids == got["r"].token_ids


def test_a_seed_gives_the_same_tokens_in_any_batch(make_engine: MakeEngine) -> None:
    sampling = {"temperature": 1.3, "top_p": 0.95, "seed": 11, "max_tokens": 24}
    alone = run(make_engine(), request("r", prompt(0, 9), adapter="all-4", **sampling))["r"]
    others = [
        request(f"o{i}", prompt(i, 5 + 7 * i), adapter=name, temperature=1.0, max_tokens=30)
        for i, name in enumerate([None, "qv-16", "all-4", "patterns"])
    ]
    crowd = run(
        make_engine(max_step_tokens=13),
        *others[:2],
        request("r", prompt(0, 9), adapter="all-4", **sampling),
        *others[2:],
    )["r"]
    assert crowd.token_ids == alone.token_ids
    other_seed = run(
        make_engine(), request("r", prompt(0, 9), adapter="all-4", **{**sampling, "seed": 12})
    )["r"]
    assert other_seed.token_ids != alone.token_ids


def test_logprobs_are_the_models_own(make_engine: MakeEngine, oracle: Oracle) -> None:
    tokens = prompt(0, 9)
    got = run(
        make_engine(),
        request("r", tokens, max_tokens=6, logprobs=3, logit_bias={7: 1.0}, temperature=0.0),
        request("none", tokens, max_tokens=6),
    )
    assert got["none"].logprobs == []
    assert len(got["r"].logprobs) == 6
    for token_id, each in zip(got["r"].token_ids, got["r"].logprobs, strict=True):
        assert each.token_id == token_id
        values = [value for _, value in each.top]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert each.logprob <= values[0] + 1e-6
    with oracle._model.disable_adapter(), torch.no_grad():
        reference = oracle._model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    first = got["r"].logprobs[0]
    assert first.logprob == pytest.approx(float(reference[first.token_id]), abs=1e-3)
    assert [token_id for token_id, _ in first.top] == reference.topk(3).indices.tolist()


@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_repetition_penalty_equals_hugging_face(
    make_engine: MakeEngine, oracle: Oracle, penalty: float
) -> None:
    tokens = prompt(4, 12)
    with oracle._model.disable_adapter():
        reference = oracle._model.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, 12, dtype=torch.long),
            max_new_tokens=15,
            repetition_penalty=penalty,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, 12:].tolist()
    got = run(make_engine(), request("r", tokens, max_tokens=15, repetition_penalty=penalty))["r"]
    assert got.token_ids == reference


def test_the_ends_of_ranges_mean_off_and_the_likeliest_token(make_engine: MakeEngine) -> None:
    same: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}

    def tokens(**fields: Any) -> list[int]:
        return run(make_engine(), request("r", prompt(4, 12), **{**same, **fields}))["r"].token_ids

    assert tokens(top_k=-1) == tokens()
    assert tokens(top_p=0) == tokens(temperature=0) != tokens()
