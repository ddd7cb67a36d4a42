"""AdamW over the spans of many runs at once, each with its own hyperparameters and clipping.

The arithmetic is torch.optim.AdamW's after torch.nn.utils.clip_grad_norm_, in the masters' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.training.pools import Pools


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One run's update: where it lies in the pools and how it is made.

    first, size  its span, in elements
    step         this update's number, from 1
    max_norm     the gradient's norm is scaled down to it; infinity: it is not
    """

    first: int
    size: int
    step: int
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = math.inf


def _update_torch(pools: Pools, run: RunStep) -> torch.Tensor:
    """Update one run; return the norm of its gradient."""
    own = slice(run.first, run.first + run.size)
    master, mean = pools.master[own], pools.first_moment[own]
    square, gradient = pools.second_moment[own], pools.gradient[own]
    norm = gradient.norm()
    if torch.isfinite(norm):
        gradient.mul_(torch.clamp(run.max_norm / (norm + 1e-6), max=1.0))
        master.mul_(1 - run.lr * run.weight_decay)
        mean.lerp_(gradient, 1 - run.beta1)
        square.mul_(run.beta2).addcmul_(gradient, gradient, value=1 - run.beta2)
        denominator = square.sqrt().div_(math.sqrt(1 - run.beta2**run.step)).add_(run.eps)
        master.addcdiv_(mean, denominator, value=-run.lr / (1 - run.beta1**run.step))
        if pools.values.data_ptr() != pools.master.data_ptr():
            pools.values[own].copy_(master)
    gradient.zero_()
    return norm


def adamw(pools: Pools, runs: Sequence[RunStep]) -> torch.Tensor:
    """Update the spans of these runs from `pools.gradient`, and set that to zero.

    -> the norm of each run's gradient before clipping [runs] float32, on the device; a run whose
    norm is not finite is left as it was, but for its gradient
    """
    norms = [_update_torch(pools, run) for run in runs]
    return torch.stack(norms).float() if norms else pools.master.new_empty(0).float()
