"""Runs of many kinds in one micro-batch, whose pools hold NaN between their factors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from kernels.training import (
    SPAN,
    LoraSite,
    Placement,
    Pools,
    Segments,
    make_segments,
    make_sites,
)


@dataclass(frozen=True)
class Batch:
    """One base weight, its runs' adapters and the tokens of each."""

    weight: torch.Tensor
    bias: torch.Tensor
    site: LoraSite
    pools: Pools
    segments: Segments
    owned: torch.Tensor  # which elements of the pools belong to a factor


@dataclass(frozen=True)
class Run:
    """rank; which of the weight's modules it trains; its tokens."""

    rank: int
    trains: tuple[bool, ...]
    tokens: int


MIXES = {
    "one token": [Run(3, (True,) * 3, 1)],
    "one run": [Run(16, (True,) * 3, 37)],
    "mixed": [
        Run(4, (True, False, True), 5),
        Run(16, (True, True, True), 1),
        Run(1, (False, True, False), 21),
        Run(33, (True, True, False), 18),
    ],
    "without rows": [Run(8, (True,) * 3, 0), Run(8, (True,) * 3, 6), Run(2, (True,) * 3, 0)],
    "one trains nothing": [Run(8, (False,) * 3, 9), Run(24, (True,) * 3, 40)],
    "nobody trains": [Run(8, (False,) * 3, 4)],
    "eights": [Run(8, (True,) * 3, 16), Run(24, (True,) * 3, 70), Run(16, (True,) * 3, 3)],
}


def make_batch(
    runs: list[Run],
    width: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Random factors; what lies between them in the pools is NaN, and in `gradient` ones."""
    torch.manual_seed(seed)
    bounds = tuple(itertools.accumulate(widths, initial=0))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    end, placements = 0, [[] for _ in widths]
    spans = []
    for number, run in enumerate(runs):
        end = -(-end // SPAN) * SPAN
        for m, out in enumerate(widths):
            if not run.trains[m]:
                placements[m].append(None)
                continue
            a, b = end, end + run.rank * width
            end = b + run.rank * out
            spans.append((a, end))
            placements[m].append(Placement(a, b, run.rank, 0.5 + number))
    master = torch.full((end + SPAN,), float("nan"), dtype=wide)
    owned = torch.zeros(end + SPAN, dtype=torch.bool)
    for low, high in spans:
        master[low:high] = torch.randn(high - low, dtype=wide) * 0.3
        owned[low:high] = True
    [site] = make_sites([bounds], [placements], device)
    master = master.to(device)
    pools = Pools(
        values=master.to(dtype),
        master=master.clone(),
        first_moment=torch.zeros_like(master),
        second_moment=torch.zeros_like(master),
        gradient=torch.ones_like(master),
    )
    return Batch(
        weight=torch.randn(bounds[-1], width, dtype=wide).to(device, dtype) / width**0.5,
        bias=torch.randn(bounds[-1], dtype=wide).to(device, dtype),
        site=site,
        pools=pools,
        segments=make_segments([run.tokens for run in runs], device),
        owned=owned.to(device),
    )
