"""The parts of a run that change from step to step: its learning rate and its next rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.training.run import RunSettings

_MEGABATCHES, _MOST_BATCHES = 4, 50


def learning_rate(settings: RunSettings, step: int) -> float:
    """Of optimiser step `step`, counted from 0.

    As transformers.optimization's get_cosine_schedule_with_warmup and get_linear_….
    """
    warmup, steps = settings.warmup_steps, settings.steps
    if step < warmup:
        return settings.learning_rate * (step / max(1, warmup))
    progress = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "constant":
        return settings.learning_rate
    if settings.schedule == "linear":
        return settings.learning_rate * max(0.0, 1.0 - progress)
    return settings.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


class RowOrder:
    """The order of a run's rows, epoch by epoch: a function of its seed alone.

    It is the Trainer's own order of the same rows under the same seed.
    """

    def __init__(self, settings: RunSettings, lengths: Sequence[int]) -> None:
        self._settings, self._lengths = settings, lengths
        self._generator = torch.Generator()
        self._number, self._indices = 0, list[int]()
        self._rewind()

    def epoch(self, number: int) -> list[int]:
        """Return the rows of epoch `number`, counted from 0."""
        if self._settings.order == "given":
            return list(range(len(self._lengths)))
        if number < self._number:
            self._rewind()
        while self._number < number:
            self._indices = self._draw()
            self._number += 1
        return self._indices

    def _rewind(self) -> None:
        self._generator.manual_seed(self._settings.seed)
        self._number = -1

    def _draw(self) -> list[int]:
        # A DataLoader draws a seed for its workers before it asks for the first index.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if self._settings.order == "group_by_length":
            return _grouped(self._lengths, self._settings.rows_per_step, self._generator)
        # RandomSampler seeds a generator of its own.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self._generator).item())
        own = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self._lengths), generator=own).tolist()


def _grouped(lengths: Sequence[int], batch: int, generator: torch.Generator) -> list[int]:
    """Shuffled, then sorted by length within a few batches; the longest row first.

    As transformers.trainer_pt_utils.get_length_grouped_indices.
    """
    indices = torch.randperm(len(lengths), generator=generator).tolist()
    size = batch * max(1, min(len(lengths) // (batch * _MEGABATCHES), _MOST_BATCHES))
    groups = [
        sorted(indices[start : start + size], key=lambda i: lengths[i], reverse=True)
        for start in range(0, len(indices), size)
    ]
    longest = max(range(len(groups)), key=lambda i: lengths[groups[i][0]])
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return [index for group in groups for index in group]
