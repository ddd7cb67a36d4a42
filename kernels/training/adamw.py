"""AdamW over the spans of many runs at once, each with its own hyperparameters and clipping.

The arithmetic is torch.optim.AdamW's after torch.nn.utils.clip_grad_norm_, in the masters' type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.training.pools import Pools
from kernels.training.uploads import upload

#: Elements that one program squares or updates.
_BLOCK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One run's update: where it lies in the pools and how it is made.

    first, size  its span, in elements: multiples of SPAN
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
    norm: torch.Tensor = gradient.norm()  # type: ignore[no-untyped-call]
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


@jit("num_blocks")
def _square_kernel(gradient_ptr, spans_ptr, partials_ptr, num_blocks, BLOCK: tl.constexpr):
    block, run = tl.program_id(0), tl.program_id(1)
    first, size = tl.load(spans_ptr + run * 2), tl.load(spans_ptr + run * 2 + 1)
    first, size = tl.multiple_of(first, 1024), tl.multiple_of(size, 1024)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.load(gradient_ptr + first + place, mask=place < size, other=0.0)
    tl.store(partials_ptr + run * num_blocks + block, tl.sum(gradient * gradient, axis=0))


@jit("num_blocks")
def _update_norms_kernel(partials_ptr, norms_ptr, num_blocks, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        total += tl.load(partials_ptr + run * num_blocks + block, mask=block < num_blocks, other=0)
    tl.store(norms_ptr + run, tl.sqrt(tl.sum(total, axis=0)))


@jit()
def _update_kernel(
    values_ptr,
    master_ptr,
    mean_ptr,
    square_ptr,
    gradient_ptr,
    spans_ptr,
    numbers_ptr,
    norms_ptr,
    HAS_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(1)
    first, size = tl.load(spans_ptr + run * 2), tl.load(spans_ptr + run * 2 + 1)
    first, size = tl.multiple_of(first, 1024), tl.multiple_of(size, 1024)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    place += first
    norm, numbers = tl.load(norms_ptr + run), numbers_ptr + run * 8
    gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0)
    if norm < float("inf"):  # which NaN is not either
        clip = tl.minimum(tl.load(numbers + 7) / (norm + 1e-6), 1.0)
        gradient *= clip
        mean = tl.load(mean_ptr + place, mask=mask, other=0.0)
        square = tl.load(square_ptr + place, mask=mask, other=0.0)
        master = tl.load(master_ptr + place, mask=mask, other=0.0)
        mean += (gradient - mean) * tl.load(numbers + 1)
        square = square * tl.load(numbers + 2) + gradient * gradient * tl.load(numbers + 3)
        denominator = tl.sqrt(square) / tl.load(numbers + 5) + tl.load(numbers + 6)
        master = master * tl.load(numbers) - tl.load(numbers + 4) * (mean / denominator)
        tl.store(mean_ptr + place, mean, mask=mask)
        tl.store(square_ptr + place, square, mask=mask)
        tl.store(master_ptr + place, master, mask=mask)
        if HAS_VALUES:
            tl.store(values_ptr + place, master.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(gradient_ptr + place, tl.zeros_like(gradient), mask=mask)


def _numbers(run: RunStep) -> tuple[float, ...]:
    """Return the factors of the update, computed in double precision."""
    root = math.sqrt(1 - run.beta2**run.step)
    size = run.lr / (1 - run.beta1**run.step)
    return (
        1 - run.lr * run.weight_decay, 1 - run.beta1, run.beta2, 1 - run.beta2, size, root,
        run.eps, run.max_norm,
    )  # fmt: skip


def adamw_triton(pools: Pools, runs: Sequence[RunStep]) -> torch.Tensor:
    """Three launches: squares of blocks, norms of runs, updates. The masters are float32."""
    device, num_blocks = pools.master.device, max(ceil_div(run.size, _BLOCK) for run in runs)
    spans = upload(torch.tensor([(run.first, run.size) for run in runs]), device)
    numbers = upload(torch.tensor([_numbers(run) for run in runs], dtype=torch.float32), device)
    partials = torch.empty(len(runs), num_blocks, dtype=torch.float32, device=device)
    norms = torch.empty(len(runs), dtype=torch.float32, device=device)
    grid = (num_blocks, len(runs))
    _square_kernel[grid](
        gradient_ptr=pools.gradient, spans_ptr=spans, partials_ptr=partials,
        num_blocks=num_blocks, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _update_norms_kernel[(len(runs),)](
        partials_ptr=partials, norms_ptr=norms, num_blocks=num_blocks,
        BLOCK=min(1024, next_power_of_2(num_blocks)), num_warps=4,
    )  # fmt: skip
    _update_kernel[grid](
        values_ptr=pools.values, master_ptr=pools.master, mean_ptr=pools.first_moment,
        square_ptr=pools.second_moment, gradient_ptr=pools.gradient, spans_ptr=spans,
        numbers_ptr=numbers, norms_ptr=norms,
        HAS_VALUES=pools.values.data_ptr() != pools.master.data_ptr(), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return norms


def adamw_torch(pools: Pools, runs: Sequence[RunStep]) -> torch.Tensor:
    """One run after the other."""
    norms = [_update_torch(pools, run) for run in runs]
    return torch.stack(norms).float() if norms else pools.master.new_empty(0).float()


def adamw(pools: Pools, runs: Sequence[RunStep]) -> torch.Tensor:
    """Update the spans of these runs from `pools.gradient`, and set that to zero.

    -> the norm of each run's gradient before clipping [runs] float32, on the device; a run whose
    norm is not finite is left as it was, but for its gradient
    """
    if use_triton(pools.master) and runs:
        return adamw_triton(pools, runs)
    return adamw_torch(pools, runs)
