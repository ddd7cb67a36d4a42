"""The runs' parameters in flat pools, and where in them the adapters of a base weight lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.training.uploads import upload

#: A run's span begins at a multiple of this many elements and is a multiple of it long.
SPAN = 1024
#: Ranks are computed in multiples of this, the least that tensor cores take.
RANK_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Pools:
    """Five flat tensors of the same layout; a run owns the same span of each.

    values         in the type of the computation; may be `master` itself
    master         float32 (float64 in tests), as are those below
    first_moment   AdamW's mean of the gradients
    second_moment  AdamW's mean of their squares
    gradient       every backward pass adds to it
    """

    values: torch.Tensor
    master: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor
    gradient: torch.Tensor


class Placement(NamedTuple):
    """A module of a run: where A [rank, in] and B [out, rank] begin, the scale of their product."""

    a: int
    b: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraSite:
    """The adapters of a base weight [out, in], whose outputs may be several modules' side by side.

    bounds     module m owns the output's columns bounds[m] to bounds[m + 1]
    a, b       [modules, runs] int64: where A [rank, in] and B [columns, rank] begin in the pools
    rank       [modules, runs] int32; 0: this run does not train this module
    scale      [modules, runs] float32
    max_rank   the largest rank; 0: nobody trains anything here
    rank_step  a power of two, 16 at most, that divides all ranks
    aligned    whether every A and B begins at a multiple of 8 elements
    """

    bounds: tuple[int, ...]
    a: torch.Tensor
    b: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor
    max_rank: int
    rank_step: int
    aligned: bool

    @property
    def num_modules(self) -> int:
        return len(self.bounds) - 1

    @property
    def padded_rank(self) -> int:
        """Columns that each module has between A and B."""
        return -(-self.max_rank // RANK_BLOCK) * RANK_BLOCK


def make_sites(
    bounds: Sequence[Sequence[int]],
    placements: Sequence[Sequence[Sequence[Placement | None]]],
    device: torch.device | str,
) -> list[LoraSite]:
    """Make the tables of many base weights, in one upload.

    bounds      of each weight
    placements  [weight][module][run]; None: the run does not train the module
    """
    offsets: list[int] = []
    ranks: list[int] = []
    scales: list[float] = []
    nowhere = Placement(0, 0, 0, 0.0)
    for modules in placements:
        cells = [[cell or nowhere for cell in module] for module in modules]
        offsets += [cell.a for module in cells for cell in module]
        offsets += [cell.b for module in cells for cell in module]
        ranks += [cell.rank for module in cells for cell in module]
        scales += [cell.scale for module in cells for cell in module]
    all_offsets = upload(torch.tensor(offsets, dtype=torch.int64), device)
    all_ranks = upload(torch.tensor(ranks, dtype=torch.int32), device)
    all_scales = upload(torch.tensor(scales, dtype=torch.float32), device)
    sites, start = [], 0
    for own_bounds, modules in zip(bounds, placements, strict=True):
        size = sum(map(len, modules))
        own = ranks[start : start + size]
        a, b = all_offsets[2 * start : 2 * (start + size)].view(2, len(modules), -1)
        sites.append(
            LoraSite(
                bounds=tuple(own_bounds),
                a=a,
                b=b,
                rank=all_ranks[start : start + size].view(len(modules), -1),
                scale=all_scales[start : start + size].view(len(modules), -1),
                max_rank=max(own, default=0),
                rank_step=math.gcd(16, *own),
                aligned=all(each % 8 == 0 for each in offsets[2 * start : 2 * (start + size)]),
            )
        )
        start += size
    return sites
