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
    """Base weights, the runs' adapters of them and the tokens of each run.

    owned  which elements of the pools belong to a factor
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    sites: list[LoraSite]
    pools: Pools
    segments: Segments
    owned: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        return self.weights[0]

    @property
    def bias(self) -> torch.Tensor:
        return self.biases[0]

    @property
    def site(self) -> LoraSite:
        return self.sites[0]


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
    others: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> Batch:
    """Random factors; what lies between them in the pools is NaN, and in `gradient` ones.

    width, widths  of the first weight, the columns of its modules; `others` of further ones
    """
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(width, widths), *others]
    placements: list[list[list[Placement | None]]] = [[[] for _ in outs] for _, outs in shapes]
    end, spans = 0, []
    for number, run in enumerate(runs):
        end = -(-end // SPAN) * SPAN
        for (own_width, outs), modules in zip(shapes, placements, strict=True):
            for m, out in enumerate(outs):
                if not run.trains[m]:
                    modules[m].append(None)
                    continue
                a, b = end, end + run.rank * own_width
                end = b + run.rank * out
                spans.append((a, end))
                scale = (1 + number) / (2 * run.rank**0.5)
                modules[m].append(Placement(a, b, run.rank, scale))
    master = torch.full((end + SPAN,), float("nan"), dtype=wide)
    owned = torch.zeros(end + SPAN, dtype=torch.bool)
    for low, high in spans:
        master[low:high] = torch.randn(high - low, dtype=wide) * 0.3
        owned[low:high] = True
    bounds = [tuple(itertools.accumulate(outs, initial=0)) for _, outs in shapes]
    master = master.to(device)
    return Batch(
        weights=[
            (torch.randn(sum(outs), own, dtype=wide) / own**0.5).to(device, dtype)
            for own, outs in shapes
        ],
        biases=[torch.randn(sum(outs), dtype=wide).to(device, dtype) for _, outs in shapes],
        sites=make_sites(bounds, placements, device),
        pools=Pools(
            values=master.to(dtype),
            master=master.clone(),
            first_moment=torch.zeros_like(master),
            second_moment=torch.zeros_like(master),
            gradient=torch.ones_like(master),
        ),
        segments=make_segments([run.tokens for run in runs], device),
        owned=owned.to(device),
    )
