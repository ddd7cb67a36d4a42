"""Logits to tokens: greedy or drawn, each request by its own parameters and its own randomness.

A drawn token is the inverse of the cumulative distribution at one uniform number, which comes from
the request's own generator: the same seed gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from engine.request import SamplingParams, TokenLogprob
from engine.sequence import Sequence

# Below this a temperature means greedy; dividing by it would overflow.
_MIN_TEMPERATURE = 1e-4
# Tokens looked at for top-p; the whole vocabulary is sorted only when they hold too little mass.
_NUM_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


class _State:
    """What sampling remembers of one sequence."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: str) -> None:
        params = sequence.request.sampling
        self.random = random.Random(sequence.seed)
        self.counts: torch.Tensor | None = None  # [V] fp32, how often each token was generated
        self.seen: torch.Tensor | None = None  # [V] bool, in the prompt or generated
        self.bias: tuple[torch.Tensor, torch.Tensor] | None = None  # token ids, what to add
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocab_size, device=device)
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(sequence.token_ids, device=device)] = True
        if params.logit_bias:
            self.bias = (
                torch.tensor(list(params.logit_bias), device=device),
                torch.tensor(list(params.logit_bias.values()), device=device),
            )
        self.stop_ids = torch.tensor(sorted(sequence.stop_ids), dtype=torch.int64, device=device)

    @property
    def adjusts(self) -> bool:
        return any(value is not None for value in (self.counts, self.seen, self.bias))

    def note(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts[token_id] += 1
        if self.seen is not None:
            self.seen[token_id] = True


class Sampler:
    """Owns the sampling state of every sequence between `add` and `remove`."""

    def __init__(self, *, vocab_size: int, device: str) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._states: dict[Sequence, _State] = {}

    def add(self, sequence: Sequence) -> None:
        self._states[sequence] = _State(sequence, self._vocab_size, self._device)

    def remove(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether the request's next token is simply the one with the largest logit."""
        params = sequence.request.sampling
        return (
            _is_greedy(params)
            and params.logprobs is None
            and sequence.num_generated >= params.min_tokens
            and not self._states[sequence].adjusts
        )

    def adjust(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> None:
        """Apply penalties, bias and min_tokens to `logits` [N, V] fp32, in place."""
        for row, sequence in zip(logits, sequences, strict=True):
            state, params = self._states[sequence], sequence.request.sampling
            if state.adjusts:
                _penalise(row, state, params)
            if sequence.num_generated < params.min_tokens and sequence.request.json_schema is None:
                row[state.stop_ids] = float("-inf")

    def choose(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], raw: torch.Tensor | None
    ) -> list[Sampled]:
        """One token for each row.

        logits  [N, V] fp32, adjusted and masked
        raw     [N, V] log-probabilities as the model gave them; needed when a request asks for
                them
        """
        token_ids = logits.argmax(dim=-1).tolist()
        drawn = [i for i, s in enumerate(sequences) if not _is_greedy(s.request.sampling)]
        if drawn:
            params = [sequences[i].request.sampling for i in drawn]
            uniform = [self._states[sequences[i]].random.random() for i in drawn]
            rows = logits if len(drawn) == len(sequences) else logits[drawn]
            for i, token_id in zip(drawn, _draw(rows, params, uniform), strict=True):
                token_ids[i] = token_id
        sampled = []
        for i, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            self._states[sequence].note(token_id)
            num_top = sequence.request.sampling.logprobs
            logprob = None
            if num_top is not None:
                assert raw is not None
                logprob = _logprob(raw[i], token_id, num_top)
            sampled.append(Sampled(token_id, logprob))
        return sampled


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _MIN_TEMPERATURE or params.top_k == 1


def _penalise(row: torch.Tensor, state: _State, params: SamplingParams) -> None:
    """row [V], changed in place; the repetition penalty is CTRL's (arXiv:1909.05858)."""
    if state.seen is not None:
        penalty = params.repetition_penalty
        penalised = torch.where(row < 0, row * penalty, row / penalty)
        row.copy_(torch.where(state.seen, penalised, row))
    if state.counts is not None:
        row.sub_(state.counts, alpha=params.frequency_penalty)
        row.sub_((state.counts > 0).float(), alpha=params.presence_penalty)
    if state.bias is not None:
        token_ids, values = state.bias
        row[token_ids] += values


def _logprob(raw: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, token_ids = raw.topk(num_top)
        top = tuple(zip(token_ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token_id, float(raw[token_id]), top)


def _draw(
    logits: torch.Tensor, params: SequenceOf[SamplingParams], uniform: SequenceOf[float]
) -> list[int]:
    """One token id per row of `logits` [N, V], at the quantile `uniform` of its distribution."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    vocab_size = logits.shape[1]
    scaled = logits / column([p.temperature for p in params]).float()
    at = column(list(uniform))
    tokens = _quantile(scaled.softmax(-1).double(), at)
    cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
    if cut:
        own = [params[i] for i in cut]
        top_k = column([p.top_k or vocab_size for p in own])
        top_p, min_p = column([p.top_p for p in own]), column([p.min_p for p in own])
        tokens[cut] = _draw_cut(scaled[cut], top_k, top_p, min_p, at[cut])
    return [int(token) for token in tokens.tolist()]


def _draw_cut(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    at: torch.Tensor,
) -> torch.Tensor:
    """scaled [N, V], the rest [N, 1] -> token ids [N]; top-k, then top-p, then min-p."""
    vocab_size = scaled.shape[1]
    total = scaled.logsumexp(-1, keepdim=True)
    limited = top_k.clamp_max(vocab_size)
    num_candidates = min(_NUM_CANDIDATES, vocab_size)
    while True:
        values, token_ids = scaled.topk(num_candidates)  # descending
        probs = (values - total).double().exp()
        order = torch.arange(num_candidates, device=scaled.device)
        probs = probs.masked_fill(order >= limited, 0.0)
        # The mass that top_p is a share of: that of the top k, or all of it.
        mass = torch.where(limited < vocab_size, probs.sum(-1, keepdim=True), 1.0)
        cumulative = probs.cumsum(-1)
        is_enough = (limited <= num_candidates) | (
            (cumulative[:, -1:] >= top_p * mass) & (limited == vocab_size)
        )
        # min_p alone keeps what is at least a share of the best: the last candidate tells.
        is_enough |= (min_p > 0) & (probs[:, -1:] < min_p * probs[:, :1])
        if num_candidates == vocab_size or bool(is_enough.all()):
            break
        num_candidates = vocab_size
    probs = probs.masked_fill(cumulative - probs >= top_p * mass, 0.0)
    probs = probs.masked_fill(probs < min_p * probs[:, :1], 0.0)
    chosen = _quantile(probs, at)
    return token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _quantile(probs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """probs [N, K] of any sum, at [N, 1] in [0, 1) -> the first index whose share exceeds it."""
    cumulative = probs.cumsum(-1)
    wanted = (at * cumulative[:, -1:]).contiguous()
    index = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    # Rounding may put `wanted` at the very end, past the last token that has any mass.
    last = probs.shape[1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
