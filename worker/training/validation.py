"""Judges a training while it goes on: its loss on rows that it does not see, its best state."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import TrainerCallback

from worker.training.batches import collate
from worker.training.example_store import IGNORED, ExampleStore

#: Validations of a training whose interval is not given.
_NUM_EVALS = 10
_FIGURES = ("losses", "loss", "loss_step", "best_step", "best_loss", "_num_worse")


def interval(steps: int, eval_steps: int | None) -> int:
    """Return the steps between two validations of a training of so many steps."""
    return eval_steps or max(1, steps // _NUM_EVALS)


class Validation(TrainerCallback):
    """Validates every few steps, keeps the best adapter, and ends a training that gets no better.

    loss       of the last validation, at step `loss_step`
    losses     [step, loss] of all that are a number
    best_loss  of all, at step `best_step`; None: there was none that is a number
    is_over    whether training was ended: it got no better, or its loss was no number any more
    """

    def __init__(
        self,
        examples: ExampleStore,
        *,
        steps: int,
        eval_steps: int | None,
        patience: int | None,
        batch_size: int,
        pad_id: int,
    ) -> None:
        self.loss: float | None = None
        self.losses: list[list[float]] = []
        self.loss_step = self.best_step = 0
        self.best_loss: float | None = None
        self.is_over = False
        # Sorted by length, so that a batch has little padding.
        self._examples = examples
        self._order = sorted(range(len(examples)), key=examples.length)
        self._steps, self._every = steps, interval(steps, eval_steps)
        self._patience, self._batch_size = patience, batch_size
        self._collate = functools.partial(collate, pad_id=pad_id)
        self._best: dict[str, torch.Tensor] = {}
        self._num_worse = 0
        #: Set once there is one: it computes the loss.
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if not self._examples or self.is_over or (step % self._every and step < self._steps):
            return
        model = kwargs["model"]
        self.loss, self.loss_step = self._mean_loss(model), step
        if math.isfinite(self.loss):
            self.losses.append([step, round(self.loss, 4)])
        if math.isfinite(self.loss) and (self.best_loss is None or self.loss < self.best_loss):
            self.best_loss, self.best_step, self._num_worse = self.loss, step, 0
            tensors = get_peft_model_state_dict(model)
            self._best = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return
        self._num_worse += 1
        if self._patience is not None and self._num_worse >= self._patience:
            self.end(control)

    def end(self, control: Any) -> None:
        """End the training after this step."""
        self.is_over = control.should_training_stop = True

    def taken(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the best state, and the figures so far: what `put` takes."""
        return self._best, {name: getattr(self, name) for name in _FIGURES}

    def put(self, figures: dict[str, Any], best: dict[str, torch.Tensor]) -> None:
        """Go on from what another process's `taken` returned."""
        for name in _FIGURES:
            setattr(self, name, figures[name])
        self._best = best

    def restore(self, model: Any) -> None:
        """Give the model its best state."""
        if self._best:
            set_peft_model_state_dict(model, self._best)

    @torch.no_grad()
    def _mean_loss(self, model: Any) -> float:
        """Return the mean loss over all tokens that are to be predicted."""
        was_training = model.training
        model.eval()
        device = next(model.parameters()).device
        total, count = 0.0, 0
        for start in range(0, len(self._order), self._batch_size):
            some = self._order[start : start + self._batch_size]
            batch = self._collate([self._examples[index].as_input() for index in some])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            number = int((batch["labels"][:, 1:] != IGNORED).sum())
            total += float(self.trainer.compute_loss(model, batch)) * number
            count += number
        model.train(was_training)
        return total / count
