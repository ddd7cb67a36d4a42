"""The log-probabilities of a preference run's answers under its start, before its first step.

A run starts from an adapter whose tensors are in its span until it makes a step: the base itself,
if they are PEFT's initial ones. So the reference costs one forward pass of the rows, and no memory
for a second adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.training.packer import Piece, cut_pieces
from engine.training.preferences import Pairs
from engine.training.run import RunRequest, RunRows
from engine.training.schedule import RowOrder


class Reference:
    """One run's reference: the pairs that it is trained on, and those held out.

    trained   of the rows that its steps take; others stay zero
    held_out  None: it is not validated
    """

    def __init__(self, request: RunRequest, order: RowOrder, budget: int) -> None:
        settings = request.settings
        assert settings.beta is not None
        self.trained = Pairs(settings.beta, _zeros(request.rows))
        self.held_out: Pairs | None = None
        taken = settings.steps * settings.rows_per_step
        examples: Sequence[int] = range(len(request.rows) // 2)
        if taken < len(examples):
            examples = sorted(order.epoch(0)[:taken])
        rows = [2 * example + place for example in examples for place in range(2)]
        self._left = [
            (self.trained, piece) for piece in cut_pieces(request.rows, rows, budget, 1.0)
        ]
        if request.held_out is not None:
            held_out = request.held_out.rows
            self.held_out = Pairs(settings.beta, _zeros(held_out))
            pieces = cut_pieces(held_out, range(len(held_out)), budget, 1.0)
            self._left += [(self.held_out, piece) for piece in pieces]

    @property
    def is_whole(self) -> bool:
        return not self._left

    @property
    def piece(self) -> Piece:
        """The rows that the run's next micro-batch takes."""
        return self._left[0][1]

    def pass_piece(self, log_probabilities: torch.Tensor) -> None:
        """Note the log-probabilities [rows] float64 of the rows of `piece`."""
        pairs, piece = self._left.pop(0)
        pairs.reference[list(piece.indices)] = log_probabilities

    def values(self) -> list[torch.Tensor]:
        """Return the log-probabilities of the rows, and of those held out, if any are."""
        return [each.reference for each in (self.trained, self.held_out) if each is not None]

    def restore(self, values: Sequence[torch.Tensor]) -> None:
        """Take what `values` returned."""
        for own, saved in zip(self.values(), values, strict=True):
            own.copy_(saved)
        self._left = []


def _zeros(rows: RunRows) -> torch.Tensor:
    return torch.zeros(len(rows), dtype=torch.float64)
