"""The events that the trainer reports of its runs, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.training.errors import TrainingError

Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run takes part from now on.

    step    optimiser steps that it had made, and said, before
    tokens  that it was trained on before
    """

    run_id: str
    step: int
    tokens: int
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The run made an optimiser step, its `step`-th, and was validated if it was time to.

    loss             mean over the answer tokens of the step's rows, before the update
    grad_norm        before clipping
    tokens           trained on since the run's beginning
    validation_loss  mean over the held-out answer tokens after the update; None: it was not
                     validated, or the loss is no finite number
    rewards          of a preference run: means over the step's pairs before the update, and with
                     the prefix `validation_` over held-out ones after it; of a run of rewards,
                     what `engine.training.policy` measures
    best_step        of the state with the least loss so far, `best_loss`
    """

    run_id: str
    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    validation_loss: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    best_step: int | None = None
    best_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesWanted:
    """The run continues once `BatchTrainer.give_samples` has its answers to these prompts.

    step      optimiser steps made
    examples  the rows of the prompts: of the run, or those held out
    """

    run_id: str
    step: int
    examples: Sequence[int]
    is_validation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last of a run.

    adapter    of a finished run: its tensors by PEFT's names, on the host, views of one; the best
               state's where there is one, else the last
    best_step  of that state, with the validation loss `best_loss`
    error      of a failed one
    """

    run_id: str
    outcome: Outcome
    step: int
    tokens: int
    adapter: dict[str, torch.Tensor] | None = field(default=None, repr=False)
    best_step: int | None = None
    best_loss: float | None = None
    error: TrainingError | None = None


Event = RunStarted | RunProgress | SamplesWanted | RunEnded
