"""The validation of a run: its losses on held-out rows, and its best state.

A validation is made in pieces, as a step is: their passes are shared with other runs, which train
between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.training.packer import Piece, cut_pieces
from engine.training.policy import Samples
from engine.training.preferences import Pairs, add_figures
from engine.training.run import HeldOut


@dataclass(frozen=True, slots=True)
class StepMade:
    """The figures of an optimiser step, reported once its validation is over.

    rewards  of the step's pairs
    """

    loss: float
    learning_rate: float
    grad_norm: float
    rewards: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, state: dict[str, Any]) -> StepMade:
        """Read what `dataclasses.asdict` made. Raises KeyError, TypeError, ValueError."""
        rewards = {str(name): float(value) for name, value in state["rewards"].items()}
        others = {name: float(value) for name, value in state.items() if name != "rewards"}
        return cls(**others, rewards=rewards)


class Validation:
    """One run's validation.

    losses     (step, loss) of all that are finite
    best       [size] the run's span of the masters after `best_step`, on the host; None: no loss
               was finite so far
    made       the step whose validation is under way; None: none is
    rewards    of the held-out pairs in the last validation
    is_over    whether the run is to end: it got no better
    """

    def __init__(
        self, held_out: HeldOut, steps: int, budget: int, pairs: Pairs | None = None
    ) -> None:
        self._held_out, self._steps, self._budget, self._pairs = held_out, steps, budget, pairs
        self.rewards: dict[str, float] = {}
        self.losses: list[tuple[int, float]] = []
        self.best: torch.Tensor | None = None
        self.best_step: int | None = None
        self.best_loss: float | None = None
        self.made: StepMade | None = None
        self.is_over = False
        self._num_worse = 0
        self._pieces: list[Piece] = []
        self._sums: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        """Return whether the state after this step is validated."""
        return step % self._held_out.every == 0 or step >= self._steps

    def begin(self, made: StepMade) -> None:
        """Begin the validation that follows a step."""
        self.made, self._sums = made, {}
        rows = self._held_out.rows
        examples = range(len(rows) if self._pairs is None else len(rows) // 2)
        self._pieces = cut_pieces(rows, examples, self._budget, 1.0, self._pairs)

    @property
    def piece(self) -> Piece:
        """The held-out rows that the run's next micro-batch takes."""
        return self._pieces[0]

    def pass_piece(self, figures: Mapping[str, float]) -> None:
        """Note that `piece` went through a micro-batch, and the sums of its figures."""
        add_figures(self._sums, figures)
        del self._pieces[0]

    def pass_samples(self, samples: Samples) -> None:
        """Note the rewards of answers to all held-out prompts: the loss is minus their mean."""
        self._sums = {**samples.figures, "loss": -float(samples.rewards.mean())}
        self._pieces = []

    @property
    def is_whole(self) -> bool:
        return not self._pieces

    def conclude(self, step: int) -> tuple[StepMade, float, bool]:
        """End the validation that follows `step`.

        -> the step, the loss, and whether it is the best one: then `best` is to be set
        """
        assert self.made is not None
        made, self.made = self.made, None
        rows = self._held_out.rows
        number = sum(rows.num_answers) if self._pairs is None else len(rows) // 2
        number = number or 1  # prompts have none: `pass_samples` noted the means
        means = {name: total / number for name, total in self._sums.items()}
        loss, self.rewards = means.pop("loss"), means
        if math.isfinite(loss):
            self.losses.append((step, loss))
            if self.best_loss is None or loss < self.best_loss:
                self.best_step, self.best_loss, self._num_worse = step, loss, 0
                return made, loss, True
        self._num_worse += 1
        patience = self._held_out.patience
        self.is_over = patience is not None and self._num_worse >= patience
        return made, loss, False

    def state(self) -> dict[str, Any]:
        """All but `best`, as JSON carries it."""
        return {
            "losses": [list(each) for each in self.losses],
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "num_worse": self._num_worse,
            "made": None if self.made is None else dataclasses.asdict(self.made),
        }

    def restore(self, state: dict[str, Any], best: torch.Tensor | None) -> None:
        """Restore a saved state. Raises KeyError, TypeError, ValueError if it cannot be read."""
        if (best is None) != (state["best_loss"] is None):
            raise ValueError("best")
        self.best = best
        self.losses = [(int(step), float(loss)) for step, loss in state["losses"]]
        if best is not None:
            self.best_step, self.best_loss = int(state["best_step"]), float(state["best_loss"])
        self._num_worse = int(state["num_worse"])
        if state["made"] is not None:
            self.begin(StepMade.read(state["made"]))
