"""What the trainer says of its runs, in the order in which it happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from engine.training.errors import TrainingError

Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """The run takes part from now on.

    step, tokens  optimiser steps that it had made before, and tokens it was trained on in them
    """

    run_id: str
    step: int
    tokens: int
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The run made an optimiser step, its `step`-th.

    loss       mean over the answer tokens of the step's rows, before the update
    grad_norm  before clipping
    tokens     trained on since the run's beginning
    """

    run_id: str
    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last of a run.

    adapter  of a finished run: its tensors by PEFT's names, on the host, views of one
    error    of a failed one
    """

    run_id: str
    outcome: Outcome
    step: int
    tokens: int
    adapter: dict[str, torch.Tensor] | None = field(default=None, repr=False)
    error: TrainingError | None = None


Event = RunStarted | RunProgress | RunEnded
