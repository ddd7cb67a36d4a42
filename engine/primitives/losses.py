"""The losses of single tokens that a call names: Tinker's, of its documentation.

With a token's log-probability by the model, and by the sampler that drew it:

    ratio                = exp(model - sampler)
    cross_entropy        = -model * weight
    importance_sampling  = -ratio * advantage
    ppo                  = -min(ratio * advantage, clipped ratio * advantage)

A call's loss is the sum over all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Bound of differences of log-probabilities, so that their exponentials stay finite.
_FAR = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss by its name; `low` and `high` bound the clipped ratio."""

    name: str
    low: float = 0.8
    high: float = 1.2

    def of(
        self, losses: torch.Tensor, weights: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' losses, and the factors of their cross-entropies' gradients.

        losses   [N] float64, cross-entropies
        weights  [N] float64, or advantages; `sampled`, the sampler's log-probabilities
        """
        if self.name == "cross_entropy":
            return losses * weights, weights
        ratio = torch.exp((-losses - sampled).clamp(-_FAR, _FAR))
        gain = ratio * weights
        if self.name == "importance_sampling":
            return -gain, gain
        clipped = ratio.clamp(self.low, self.high) * weights
        return -torch.minimum(gain, clipped), torch.where(clipped < gain, 0.0, gain)


@dataclass(frozen=True, slots=True)
class PackedLosses:
    """The losses of a micro-batch's pieces, with [N] float64 of all of them on its device."""

    parts: Sequence[tuple[TokenLoss, int]]
    weights: torch.Tensor
    sampled: torch.Tensor

    def factors(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the factor of each token's gradient [N]."""
        return torch.cat([factors for _, factors in self._each(losses)])

    def sums(self, losses: torch.Tensor) -> list[float]:
        """Return the sum of each piece's losses."""
        return [float(values.sum()) for values, _ in self._each(losses)]

    def _each(self, losses: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        counts = [count for _, count in self.parts]
        tables = (losses.double(), self.weights, self.sampled)
        split = zip(*(torch.split(table, counts) for table in tables), strict=True)
        return [loss.of(*own) for (loss, _), own in zip(self.parts, split, strict=True)]
