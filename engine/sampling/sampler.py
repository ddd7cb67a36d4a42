"""Sampler: chooses tokens, greedy or drawn, by each request's own parameters and seed.

A token is drawn with Gumbel noise (`gumbel`), whose key comes from the request's own generator: the
same seed gives the same noise whatever else is in the batch. In a batch of another size logits may
be rounded differently; that changes a token only if the two best are as close as the rounding.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.errors import EngineError
from engine.request import SamplingParams, TokenLogprob
from engine.sampling.gumbel import gumbel_noise, token_codes
from engine.sequence import Sequence

# A temperature below this means greedy; dividing by it would overflow.
_MIN_TEMPERATURE = 1e-4
#: Share of the likeliest token where `top_p` is 0.
_MIN_TOP_P = 1e-6
# Number of most likely tokens that top-p looks at; only if they hold too little probability is the
# whole vocabulary sorted.
_NUM_CANDIDATES = 512
# Number of noise values that a CPU computes at a time, so that intermediate results stay in its
# cache.
_MAX_NOISE = 1 << 18


class Sampled(NamedTuple):
    """One row's token.

    error    why there is no token
    largest  the row's largest logit, if the host has it
    """

    token_id: int
    logprob: TokenLogprob | None
    error: EngineError | None = None
    largest: float = 0.0


class _State:
    """The sampling state of one sequence."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: torch.device) -> None:
        params = sequence.request.sampling
        seed = sequence.seed
        # Random ignores a seed's sign: -1 would draw what 1 draws.
        self._random = random.Random(None if seed is None else seed % 2**64)
        self._keys = array("q")
        self.is_flat = False  # its most likely tokens held too little, see `_NUM_CANDIDATES`
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
        # Made only if it is needed: a copy to the device waits for the device's work.
        self.stop_ids: torch.Tensor | None = None  # forbidden until min_tokens are generated
        if params.min_tokens:
            stop_ids = sorted(sequence.stop_ids)
            self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.adjusts = any(value is not None for value in (self.counts, self.seen, self.bias))
        self.is_plain = not (self.adjusts or params.min_tokens or params.logprobs is not None)

    def key(self, index: int) -> int:
        """Return the key of the noise for the sequence's token `index`: odd, int64."""
        while len(self._keys) <= index:
            self._keys.append((self._random.getrandbits(63) << 1) + 1 - (1 << 63))
        return self._keys[index]

    def note(self, token_id: int) -> None:
        if self.counts is not None:
            self.counts[token_id] += 1
        if self.seen is not None:
            self.seen[token_id] = True


class Sampler:
    """Owns the sampling state of every sequence between `add` and `remove`."""

    def __init__(self, *, vocab_size: int, device: str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._codes = token_codes(vocab_size, self._device)
        self._states: dict[Sequence, _State] = {}

    def add(self, sequence: Sequence) -> None:
        self._states[sequence] = _State(sequence, self._vocab_size, self._device)

    def remove(self, sequence: Sequence) -> None:
        self._states.pop(sequence, None)

    def note(self, sequence: Sequence, token_id: int) -> None:
        """Note a token that was not chosen by `choose`."""
        self._states[sequence].note(token_id)

    def is_free(self, sequence: Sequence) -> bool:
        """Return whether the device can choose the next tokens from the model's logits alone."""
        state = self._states[sequence]
        if state.is_plain:
            return not state.is_flat
        params = sequence.request.sampling
        return (
            params.logprobs is None
            and (not params.min_tokens or sequence.num_generated >= params.min_tokens)
            and not state.adjusts
            and not state.is_flat
        )

    def draw(
        self, sequences: SequenceOf[Sequence], depths: SequenceOf[int] | None = None
    ) -> Draw | None:
        """Make the Draw for the free `sequences`; None: all are greedy.

        depths  drafts that stand before each token; None: no token has any
        """
        rows = [i for i, s in enumerate(sequences) if not _is_greedy(s.request.sampling)]
        if not rows:
            return None
        drawn = [(sequences[i], self._states[sequences[i]]) for i in rows]
        return Draw(rows, drawn, self._codes, [0 if depths is None else depths[i] for i in rows])

    def adjust(self, logits: torch.Tensor, index: int, sequence: Sequence) -> None:
        """Apply penalties, bias and min_tokens to row `index` of `logits` [N, V] fp32, in place."""
        state, params = self._states[sequence], sequence.request.sampling
        if state.adjusts:
            _penalise(logits[index], state, params)
        is_early = sequence.num_generated < params.min_tokens
        if is_early and sequence.request.grammar is None:
            assert state.stop_ids is not None
            logits[index, state.stop_ids] = float("-inf")

    def choose(
        self, logits: torch.Tensor, sequences: SequenceOf[Sequence], raw: torch.Tensor | None
    ) -> list[Sampled]:
        """Return one token for each row.

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
        keys = _upload_keys([self._states[s].key(s.num_generated) for s in sequences], self._codes)
        most = min(_NUM_CANDIDATES, self._vocab_size)
        tokens, sure = _draw(logits, params, keys, self._codes, most)
        if sure is not None and not bool(sure.all()):
            tokens, _ = _draw(logits, params, keys, self._codes, self._vocab_size)
        token_ids: list[int] = tokens.tolist()
        return token_ids


class Draw:
    """Draws tokens for the same rows step after step; the host waits for nothing.

    rows    of the batch, the drawn ones
    drawn   their sequences and states
    codes   [V] of the vocabulary
    depths  drafts before each row's token
    """

    def __init__(
        self,
        rows: list[int],
        drawn: list[tuple[Sequence, _State]],
        codes: torch.Tensor,
        depths: list[int],
    ) -> None:
        self._rows, self._drawn, self._depths = rows, drawn, depths
        self._codes, self._vocab_size = codes, len(codes)
        own = [sequence.request.sampling for sequence, _ in drawn]
        self._params = _Parameters(own, self._vocab_size, codes.device)
        self._row_ids = _upload(rows, codes.device).long().squeeze(1)

    def launch(self, logits: torch.Tensor, token_ids: torch.Tensor, marked: torch.Tensor) -> Drawn:
        """Write the rows' tokens into `token_ids` [N], for logits [N, V].

        marked  [N] the greedy tokens, as `kernels.sampling.mark_ref` returns them
        """
        places = zip(self._drawn, self._depths, strict=True)
        own_keys = [state.key(s.num_generated + depth) for (s, state), depth in places]
        keys = _upload_keys(own_keys, self._codes)
        own = logits.index_select(0, self._row_ids).float()
        most = min(_NUM_CANDIDATES, self._vocab_size)
        tokens, sure = _draw(own, self._params, keys, self._codes, most)
        token_ids.index_copy_(0, self._row_ids, tokens)
        if sure is not None and most < self._vocab_size:
            tokens = torch.where(sure, tokens, ~tokens)
        was = marked.index_select(0, self._row_ids)
        tokens = torch.where(was < 0, was, tokens)
        marked = marked.index_copy(0, self._row_ids, tokens)
        return Drawn(marked=marked, logits=own, keys=keys, draw=self)

    def mend(self, token_ids: list[int], drawn: Drawn) -> None:
        """Replace each token that is not certain, and so below 0, by the right one."""
        tokens, _ = _draw(drawn.logits, self._params, drawn.keys, self._codes, self._vocab_size)
        right = tokens.tolist()
        for i, (row, (_, state)) in enumerate(zip(self._rows, self._drawn, strict=True)):
            if token_ids[row] < 0:
                token_ids[row] = right[i]
                state.is_flat = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One step's tokens, and what they were drawn from.

    marked  [N] int64; ~token if the token is not certain, OVERFLOWED if there is none
    """

    marked: torch.Tensor
    logits: torch.Tensor
    keys: torch.Tensor
    draw: Draw


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _MIN_TEMPERATURE or params.top_k == 1


def _penalise(row: torch.Tensor, state: _State, params: SamplingParams) -> None:
    """Apply penalties to row [V], in place; the repetition penalty is CTRL's (arXiv:1909.05858)."""
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
    """Copy values [N] to the device as [N, 1] fp64, without waiting for the device's work."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1).to(device, non_blocking=True)


def _upload_keys(keys: SequenceOf[int], codes: torch.Tensor) -> torch.Tensor:
    """Copy keys [N] to the device of `codes` as [N, 1] int64, without waiting either."""
    return torch.tensor(keys, dtype=torch.int64).unsqueeze(1).to(codes.device, non_blocking=True)


class _Parameters:
    """The sampling parameters of rows, as columns on the device.

    cut, whole  rows whose distribution is cut to its most likely tokens, and the other rows
    """

    def __init__(self, params: SequenceOf[SamplingParams], vocab_size: int, device: Any) -> None:
        self.temperature = _upload([p.temperature for p in params], device).float()
        self.cut = [
            i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0
        ]
        self.whole = sorted({*range(len(params))}.difference(self.cut))
        own = [params[i] for i in self.cut]
        self.cut_rows = _upload(self.cut, device).long().squeeze(1)
        self.whole_rows = _upload(self.whole, device).long().squeeze(1)
        most = (p.top_k if p.top_k > 0 else vocab_size for p in own)
        self.top_k = _upload([min(number, vocab_size) for number in most], device)
        self.top_p = _upload([max(p.top_p, _MIN_TOP_P) for p in own], device)
        self.min_p = _upload([p.min_p for p in own], device)


def _draw(
    logits: torch.Tensor,
    params: _Parameters,
    keys: torch.Tensor,
    codes: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (tokens [N], whether each is certain [N]; None: all are).

    logits          [N, V] fp32
    keys, codes     [N, 1] of the rows' noise, [V] of the tokens
    num_candidates  most likely tokens to look at if a distribution is cut; a token is not certain
                    if they hold too little probability
    """
    # Relative to the largest, so that the best are near 0, where fp32 is finest.
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    if not params.cut:
        return _best(scaled, keys, codes), None
    if not params.whole:
        return _draw_cut(scaled, params, keys, codes, num_candidates)
    rows, others = params.cut_rows, params.whole_rows
    tokens = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    tokens.index_copy_(0, others, _best(scaled[others], keys[others], codes))
    own, is_enough = _draw_cut(scaled[rows], params, keys[rows], codes, num_candidates)
    sure = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    return tokens.index_copy_(0, rows, own), sure.index_copy_(0, rows, is_enough)


def _best(scaled: torch.Tensor, keys: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the index [N] of the largest of scaled [N, K] plus noise; codes [K] or [N, K]."""
    if scaled.device.type != "cpu" or scaled.numel() <= _MAX_NOISE:
        return gumbel_noise(keys, codes).add_(scaled).argmax(-1)
    codes, count = codes.expand_as(scaled), max(1, _MAX_NOISE // scaled.shape[1])
    parts = [slice(i, i + count) for i in range(0, len(scaled), count)]
    return torch.cat([
        gumbel_noise(keys[part], codes[part]).add_(scaled[part]).argmax(-1) for part in parts
    ])  # fmt: skip


def _draw_cut(
    scaled: torch.Tensor,
    params: _Parameters,
    keys: torch.Tensor,
    codes: torch.Tensor,
    num_candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw after top-k, then top-p, then min-p; return (token ids [C], whether certain [C]).

    scaled [C, V], keys [C, 1], codes [V]
    """
    vocab_size = scaled.shape[1]
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    values, token_ids = scaled.topk(num_candidates)  # descending
    probs = (values - scaled.logsumexp(-1, keepdim=True)).double().exp()
    order = torch.arange(num_candidates, device=scaled.device)
    probs = probs.masked_fill(order >= top_k, 0.0)
    # top_p is a share of this mass: that of the top k, or 1.
    mass = torch.where(top_k < vocab_size, probs.sum(-1, keepdim=True), 1.0)
    cumulative = probs.cumsum(-1)
    is_enough = (top_k <= num_candidates) | (
        (cumulative[:, -1:] >= top_p * mass) & (top_k == vocab_size)
    )
    # min_p keeps tokens of at least a share of the best's probability: compare the last candidate.
    is_enough |= (min_p > 0) & (probs[:, -1:] < min_p * probs[:, :1])
    is_cut = (
        (order >= top_k) | (cumulative - probs >= top_p * mass) | (probs < min_p * probs[:, :1])
    )
    chosen = _best(values.masked_fill(is_cut, float("-inf")), keys, codes[token_ids])
    return token_ids.gather(1, chosen.unsqueeze(1)).squeeze(1), is_enough.squeeze(1)
