"""Logits to tokens: greedy or drawn, each request by its own parameters and its own randomness.

A drawn token is the inverse of the cumulative distribution at one uniform number, which comes from
the request's own generator: the same seed gives the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprob
from engine.sequence import Sequence

# Below this a temperature means greedy; dividing by it would overflow.
_MIN_TEMPERATURE = 1e-4
# Tokens looked at for top-p; the whole vocabulary is sorted only when they hold too little mass.
_NUM_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token.

    error    there is no token, and this is why
    largest  of the row's logits, where the host has seen it
    """

    token_id: int
    logprob: TokenLogprob | None
    error: EngineError | None = None
    largest: float = 0.0


class _State:
    """What sampling remembers of one sequence."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: str) -> None:
        params = sequence.request.sampling
        self._random, self._uniform = random.Random(sequence.seed), array("d")
        self.is_flat = False  # its most likely tokens held too little: see `_NUM_CANDIDATES`
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
                torch.tensor(list(map(float, params.logit_bias.values())), device=device),
            )
        self.stop_ids = torch.tensor(sorted(sequence.stop_ids), dtype=torch.int64, device=device)

    @property
    def adjusts(self) -> bool:
        return any(value is not None for value in (self.counts, self.seen, self.bias))

    def uniform(self, index: int) -> float:
        """The number in [0, 1) by which the sequence's token `index` is drawn."""
        while len(self._uniform) <= index:
            self._uniform.append(self._random.random())
        return self._uniform[index]

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

    def is_free(self, sequence: Sequence) -> bool:
        """Whether the next tokens can be chosen from the model's logits alone, on the device."""
        params, state = sequence.request.sampling, self._states[sequence]
        return (
            params.logprobs is None
            and sequence.num_generated >= params.min_tokens
            and not state.adjusts
            and not state.is_flat
        )

    def draw(self, sequences: SequenceOf[Sequence]) -> Draw | None:
        """What the free `sequences` draw their next tokens by; None: all are greedy."""
        rows = [i for i, s in enumerate(sequences) if not _is_greedy(s.request.sampling)]
        if not rows:
            return None
        drawn = [(sequences[i], self._states[sequences[i]]) for i in rows]
        return Draw(rows, drawn, self._vocab_size, self._device)

    def adjust(self, logits: torch.Tensor, index: int, sequence: Sequence) -> None:
        """Apply penalties, bias and min_tokens to row `index` of `logits` [N, V] fp32, in place."""
        state, params = self._states[sequence], sequence.request.sampling
        if state.adjusts:
            _penalise(logits[index], state, params)
        if sequence.num_generated < params.min_tokens and sequence.request.grammar is None:
            logits[index, state.stop_ids] = float("-inf")

    def choose(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], raw: torch.Tensor | None
    ) -> list[Sampled]:
        """One token for each row.

        logits  [N, V] fp32, adjusted and masked
        raw     [N, V] log-probabilities as the model gave them; needed when a request asks for
                them
        """
        values, indices = logits.max(dim=-1)
        largest, token_ids = values.tolist(), indices.tolist()
        drawn = [i for i, s in enumerate(sequences) if not _is_greedy(s.request.sampling)]
        if drawn:
            rows = logits if len(drawn) == len(sequences) else logits[drawn]
            chosen = self._draw_now(rows, [sequences[i] for i in drawn])
            for i, token_id in zip(drawn, chosen, strict=True):
                token_ids[i] = token_id
        sampled = []
        for i, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            num_top = sequence.request.sampling.logprobs
            logprob = None
            if num_top is not None:
                assert raw is not None
                logprob = _logprob(raw[i], token_id, num_top)
            sampled.append(Sampled(token_id, logprob, largest=largest[i]))
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            self._states[sequence].note(token_id)
        return sampled

    def _draw_now(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
        """Draw from logits [N, V] fp32 and wait for the tokens."""
        params = _Parameters(
            [s.request.sampling for s in sequences], self._vocab_size, logits.device
        )
        at = _upload([self._states[s].uniform(s.num_generated) for s in sequences], logits.device)
        tokens, sure = _draw(logits, params, at, min(_NUM_CANDIDATES, self._vocab_size))
        if sure is not None and not bool(sure.all()):
            tokens, _ = _draw(logits, params, at, self._vocab_size)
        token_ids: list[int] = tokens.tolist()
        return token_ids


class Draw:
    """Draws tokens for the same rows step after step; the host waits for nothing.

    rows   of the batch, the drawn ones
    drawn  their sequences and states
    """

    def __init__(
        self,
        rows: list[int],
        drawn: list[tuple[Sequence, _State]],
        vocab_size: int,
        device: str,
    ) -> None:
        self._rows, self._drawn = rows, drawn
        self._vocab_size, self._device = vocab_size, torch.device(device)
        own = [sequence.request.sampling for sequence, _ in drawn]
        self._params = _Parameters(own, vocab_size, self._device)
        self._row_ids = _upload(rows, self._device).long().squeeze(1)

    def launch(self, logits: torch.Tensor, token_ids: torch.Tensor, marked: torch.Tensor) -> Drawn:
        """Write the rows' tokens into `token_ids` [N], for logits [N, V].

        marked  [N] the greedy tokens, as `kernels.sampling.mark_ref` has them
        """
        uniform = [state.uniform(s.num_generated) for s, state in self._drawn]
        at = _upload(uniform, self._device)
        own = logits.index_select(0, self._row_ids).float()
        most = min(_NUM_CANDIDATES, self._vocab_size)
        tokens, sure = _draw(own, self._params, at, most)
        token_ids.index_copy_(0, self._row_ids, tokens)
        if sure is not None and most < self._vocab_size:
            tokens = torch.where(sure, tokens, ~tokens)
        was = marked.index_select(0, self._row_ids)
        tokens = torch.where(was < 0, was, tokens)
        marked = marked.index_copy(0, self._row_ids, tokens)
        return Drawn(marked=marked, logits=own, at=at, draw=self)

    def mend(self, token_ids: list[int], drawn: Drawn) -> None:
        """Put the right token in place of each that is not sure, which is below 0."""
        tokens, _ = _draw(drawn.logits, self._params, drawn.at, self._vocab_size)
        right = tokens.tolist()
        for i, (row, (_, state)) in enumerate(zip(self._rows, self._drawn, strict=True)):
            if token_ids[row] < 0:
                token_ids[row] = right[i]
                state.is_flat = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One step's tokens, and what they were drawn from.

    marked  [N] int64; ~token where the token is not sure, OVERFLOWED where there is none
    """

    marked: torch.Tensor
    logits: torch.Tensor
    at: torch.Tensor
    draw: Draw


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


def _upload(values: SequenceOf[float], device: torch.device) -> torch.Tensor:
    """values [N] -> [N, 1] fp64 on the device; does not wait for what the device is doing."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(device, non_blocking=True)


class _Parameters:
    """What rows are drawn by, as columns on the device."""

    def __init__(self, params: SequenceOf[SamplingParams], vocab_size: int, device: Any) -> None:
        self.temperature = _upload([p.temperature for p in params], device).float()
        # Rows whose distribution is cut to its most likely tokens.
        self.cut = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p > 0.0]
        own = [params[i] for i in self.cut]
        self.cut_rows = _upload(self.cut, device).long().squeeze(1)
        self.top_k = _upload([min(p.top_k or vocab_size, vocab_size) for p in own], device)
        self.top_p = _upload([p.top_p for p in own], device)
        self.min_p = _upload([p.min_p for p in own], device)


def _draw(
    logits: torch.Tensor, params: _Parameters, at: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(tokens [N], which of them are sure [N]; None: all), at the quantiles `at` [N, 1].

    logits          [N, V] fp32
    num_candidates  most likely tokens that are looked at where a distribution is cut; a token is
                    not sure where they hold too little
    """
    scaled = logits / params.temperature
    tokens = _quantile(scaled.softmax(-1).double(), at)
    if not params.cut:
        return tokens, None
    rows = params.cut_rows
    own, is_enough = _draw_cut(scaled[rows], params, at[rows], num_candidates)
    sure = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    return tokens.index_copy(0, rows, own), sure.index_copy(0, rows, is_enough)


def _draw_cut(
    scaled: torch.Tensor, params: _Parameters, at: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """scaled [C, V], at [C, 1] -> token ids, whether they are sure [C].

    Top-k, then top-p, then min-p.
    """
    vocab_size = scaled.shape[1]
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    values, token_ids = scaled.topk(num_candidates)  # descending
    probs = (values - scaled.logsumexp(-1, keepdim=True)).double().exp()
    order = torch.arange(num_candidates, device=scaled.device)
    probs = probs.masked_fill(order >= top_k, 0.0)
    # The mass that top_p is a share of: that of the top k, or all of it.
    mass = torch.where(top_k < vocab_size, probs.sum(-1, keepdim=True), 1.0)
    cumulative = probs.cumsum(-1)
    is_enough = (top_k <= num_candidates) | (
        (cumulative[:, -1:] >= top_p * mass) & (top_k == vocab_size)
    )
    # min_p alone keeps what is at least a share of the best: the last candidate tells.
    is_enough |= (min_p > 0) & (probs[:, -1:] < min_p * probs[:, :1])
    probs = probs.masked_fill(cumulative - probs >= top_p * mass, 0.0)
    probs = probs.masked_fill(probs < min_p * probs[:, :1], 0.0)
    chosen = _quantile(probs, at)
    return token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1), is_enough.squeeze(1)


def _quantile(probs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """probs [N, K] of any sum, at [N, 1] in [0, 1) -> the first index whose share exceeds it."""
    cumulative = probs.cumsum(-1)
    wanted = (at * cumulative[:, -1:]).contiguous()
    index = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    # Rounding may put `wanted` at the very end, past the last token that has any mass.
    last = probs.shape[1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
