"""The loss of sampled answers by their rewards: a clipped policy gradient, near the run's start.

For each prompt a group of answers is sampled and rewarded. With the log-probabilities of an
answer's token by the trained model, by the sampler, and by the run's start:

    advantage = reward - mean of the group's rewards
    ratio     = exp(model - sampler)
    distance  = exp(start - model) - (start - model) - 1
    loss      = -min(ratio * advantage, clipped ratio * advantage) + beta * distance

The step's loss is the sum over all its tokens, divided by its answers and by the most tokens that
an answer may have. Neither an answer's own length nor the spread of its group's rewards divides:
both would favour some answers for what is not their reward (arXiv:2503.20783).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.training.run import RunRows, RunSettings

#: A difference of log-probabilities between sampler and trainer that counts as a mismatch.
MISMATCH = 0.02
# Bound of differences of log-probabilities, so that their exponentials stay finite.
_FAR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The answers of one step, group after group.

    rows       each prompt with an answer, whose tokens are marked
    rewards    [rows] float64
    sampled    [marked tokens] float64, log-probabilities by the sampler
    start      the same by the run's start
    figures    of the rewards, told with the step
    """

    rows: RunRows
    rewards: torch.Tensor
    sampled: torch.Tensor
    start: torch.Tensor
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """The numbers by which the answers of a step are trained.

    advantages      [rows] float64
    sampled, start  [tokens of the answers] float64, on the host; `first`, where each row's begin
    token_weight    of each token's loss
    """

    advantages: torch.Tensor
    sampled: torch.Tensor
    start: torch.Tensor
    first: Sequence[int]
    token_weight: float
    beta: float
    clip: float

    @classmethod
    def of(cls, samples: Samples, settings: RunSettings) -> Policy:
        assert settings.samples and settings.max_tokens and settings.clip
        groups = samples.rewards.double().view(-1, settings.samples)
        return cls(
            advantages=(groups - groups.mean(1, keepdim=True)).flatten(),
            sampled=samples.sampled.double(),
            start=samples.start.double(),
            first=list(itertools.accumulate(samples.rows.num_answers, initial=0)),
            token_weight=1 / (len(samples.rows) * settings.max_tokens),
            beta=settings.beta or 0.0,
            clip=settings.clip,
        )

    @property
    def num_tokens(self) -> int:
        return self.first[-1]

    def token_table(self, indices: Sequence[int]) -> torch.Tensor:
        """Return [tokens of these rows, columns of PackedPolicy] float64."""
        parts = []
        for row in indices:
            own = slice(self.first[row], self.first[row + 1])
            part = torch.empty(own.stop - own.start, _COLUMNS, dtype=torch.float64)
            part[:, 0], part[:, 1] = self.sampled[own], self.start[own]
            part[:, 2] = self.advantages[row]
            part[:, 3:] = torch.tensor(
                (self.beta, self.clip, self.token_weight, 1 / self.num_tokens, 1.0),
                dtype=torch.float64,
            )
            parts.append(part)
        return torch.cat(parts)


_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class PackedPolicy:
    """The answers' tokens of a micro-batch, on its device.

    table   [8, N] float64: the log-probabilities by sampler and start, the advantage, beta, clip,
            the weight of the loss, that of the means, and 1 where the token is of an answer that
            was sampled
    counts  of the N, each piece's; `own`, the pieces with sampled answers
    """

    table: torch.Tensor
    counts: torch.Tensor
    own: Sequence[int]

    @classmethod
    def of(
        cls, pieces: Sequence[tuple[Policy | None, Sequence[int], int]], device: torch.device
    ) -> PackedPolicy | None:
        """Join pieces: (policy, rows, answer tokens); None: no piece has sampled answers."""
        own = [number for number, (policy, *_) in enumerate(pieces) if policy is not None]
        if not own:
            return None
        parts = [
            torch.zeros(count, _COLUMNS, dtype=torch.float64)
            if policy is None
            else policy.token_table(indices)
            for policy, indices, count in pieces
        ]
        table = torch.cat(parts).T.contiguous().to(device, non_blocking=True)
        counts = torch.tensor([count for *_, count in pieces]).to(device, non_blocking=True)
        return cls(table, counts, own)

    def factors(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the factor of each answer token's gradient [N] float64; 1 for other rows'."""
        _, _, advantage, beta, _, weight, _, is_own = self.table
        ratio, away, is_clipped = self._compared(losses)
        pull = torch.where(is_clipped, 0.0, advantage * ratio) - beta * (1 - torch.exp(away))
        return torch.where(is_own > 0, weight * pull, 1.0)

    def measure(self, losses: torch.Tensor) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each piece with sampled answers, and the weighted sums of its figures."""
        sampled, _, advantage, beta, clip, weight, share, _ = self.table
        ratio, away, is_clipped = self._compared(losses)
        distance = torch.exp(away) - away - 1
        bounded = torch.minimum(torch.maximum(ratio, 1 - clip), 1 + clip)
        gain = torch.minimum(ratio * advantage, bounded * advantage)
        mismatch = (-losses.double() - sampled).abs()
        figures = {
            "loss": weight * (beta * distance - gain),
            "kl": share * distance,
            "entropy": share * losses.double(),
            "clipped": share * is_clipped,
            "mismatch": share * mismatch,
            "mismatch_share": share * (mismatch > MISMATCH),
        }
        table = torch.stack(list(figures.values()), 1)
        sums = torch.segment_reduce(table, "sum", lengths=self.counts, axis=0).cpu()
        for piece in self.own:
            yield piece, dict(zip(figures, sums[piece].tolist(), strict=True))

    def _compared(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> ratio to the sampler, start - model, and whether the clipped ratio counts: [N]"""
        sampled, start, advantage, _, clip, *_ = self.table
        model = -losses.double()
        ratio = torch.exp((model - sampled).clamp(-_FAR, _FAR))
        too_high = (advantage > 0) & (ratio > 1 + clip)
        too_low = (advantage < 0) & (ratio < 1 - clip)
        return ratio, (start - model).clamp(-_FAR, _FAR), too_high | too_low
