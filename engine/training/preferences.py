"""The loss of pairs of answers: DPO (arXiv:2305.18290), with the figures of TRL's DPOTrainer.

A pair is two rows with the same prompt: the better answer, then the worse one. With the sum of an
answer's log-probabilities and the same sum under the reference, the adapter that the run starts
from:

    reward = beta * (log_probability - reference)
    loss   = -log sigmoid(reward of the better - reward of the worse)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one run: rows 2 i and 2 i + 1 are pair i.

    reference  [rows] float64 on the host, written before the first step
    """

    beta: float
    reference: torch.Tensor


def row_sums(losses: torch.Tensor, row_answers: torch.Tensor) -> torch.Tensor:
    """Return the sums of answer tokens' losses [N] by rows: [rows] float64."""
    return torch.segment_reduce(losses.double(), "sum", lengths=row_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPairs:
    """The pairs of a micro-batch, on its device.

    better     [P] int64, the row of each pair's better answer; the next row is the worse one
    beta       [P, 1] float64; `weight` [P] float64, of each pair's loss
    reference  [P, 2] float64
    counts     (piece, its number of pairs)
    """

    better: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    reference: torch.Tensor
    counts: Sequence[tuple[int, int]]

    @classmethod
    def of(
        cls, pieces: Iterable[tuple[int, Sequence[int], float, Pairs | None]], device: torch.device
    ) -> PackedPairs | None:
        """Join the pairs of pieces: (number, rows, weight, pairs); None: no piece has any."""
        better, beta, weight, reference, counts, row = [], [], [], [], [], 0
        for number, indices, share, pairs in pieces:
            if pairs is not None:
                count = len(indices) // 2
                better += [row + 2 * place for place in range(count)]
                beta += [pairs.beta] * count
                weight += [share] * count
                reference.append(pairs.reference[list(indices)].view(-1, 2))
                counts.append((number, count))
            row += len(indices)
        if not counts:
            return None

        def there(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)

        return cls(
            better=torch.tensor(better).to(device, non_blocking=True),
            beta=there(beta)[:, None],
            weight=there(weight),
            reference=torch.cat(reference).to(device, non_blocking=True),
            counts=counts,
        )

    def factors(self, losses: torch.Tensor, row_answers: torch.Tensor) -> torch.Tensor:
        """Return the factor of each answer token's gradient [N] float64; 1 outside of pairs."""
        rewards = self._rewards(losses, row_answers)
        pull = self.weight * self.beta[:, 0] * torch.sigmoid(rewards[:, 1] - rewards[:, 0])
        of_rows = torch.ones(len(row_answers), dtype=torch.float64, device=losses.device)
        of_rows[self.better], of_rows[self.better + 1] = pull, -pull
        return of_rows.repeat_interleave(row_answers)

    def measure(
        self, losses: torch.Tensor, row_answers: torch.Tensor
    ) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield each piece with pairs, and the weighted sums of their figures."""
        rewards = self._rewards(losses, row_answers)
        margin = rewards[:, 0] - rewards[:, 1]
        figures = {
            "loss": -functional.logsigmoid(margin),
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "reward_margin": margin,
            "reward_accuracy": (margin > 0).double(),
        }
        table = (torch.stack(list(figures.values()), 1) * self.weight[:, None]).cpu()
        parts = torch.split(table, [count for _, count in self.counts])
        for (piece, _), part in zip(self.counts, parts, strict=True):
            yield piece, dict(zip(figures, part.sum(0).tolist(), strict=True))

    def _rewards(self, losses: torch.Tensor, row_answers: torch.Tensor) -> torch.Tensor:
        """-> [P, 2] float64, of the better and the worse answers"""
        sums = -row_sums(losses, row_answers)
        of_pairs = torch.stack((sums[self.better], sums[self.better + 1]), 1)
        return self.beta * (of_pairs - self.reference)


def add_figures(sums: dict[str, float], figures: Mapping[str, float]) -> None:
    """Add figures to sums of theirs."""
    for name, value in figures.items():
        sums[name] = sums.get(name, 0.0) + value
