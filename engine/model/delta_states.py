"""DeltaStates: one step of the gated delta nets, over states in pages of the arena.

The states of a sequence are one row of numbers in fp32, layer after layer, cut into pages. A step
reads them from pages that may belong to the prefix cache, and writes them to the sequence's own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from engine.model.config import ModelConfig
from kernels.delta import DeltaState, DeltaWeights, delta_net, groups_of


class StatePages(NamedTuple):
    """The pages of the states of a step's sequences.

    read    [S, pages] int64
    write   [S, pages] int64
    is_new  [S] bool: nothing is computed yet; then what is read has no meaning
    """

    read: torch.Tensor
    write: torch.Tensor
    is_new: torch.Tensor


class DeltaStates:
    """The states of one step's sequences.

    query_start  [S + 1] the rows of each sequence
    """

    def __init__(
        self,
        pages: StatePages,
        query_start: torch.Tensor,
        arena: torch.Tensor,
        config: ModelConfig,
    ) -> None:
        assert config.plan.delta is not None
        self._pages, self._shape, self._eps = pages, config.plan.delta, config.plan.eps
        self._arena = arena.view(torch.float32)
        self._groups = list(groups_of(query_start.tolist(), arena.device))

    def mix(self, packed: torch.Tensor, weights: DeltaWeights, index: int) -> torch.Tensor:
        """packed [T, sum of widths] of the delta net `index` of all -> [T, value_size]"""
        out = packed.new_empty(len(packed), self._shape.value_size)
        for members, rows in self._groups:
            before = self._read(members, index)
            out[rows], after = delta_net(packed[rows], before, weights, self._shape, self._eps)
            self._write(members, index, after)
        return out

    def _read(self, members: list[int], index: int) -> DeltaState:
        pages, is_new = self._pages.read[members], self._pages.is_new[members]
        places, part = self._place(index)
        numbers = self._arena[pages[:, places]].flatten(1)[:, part]
        numbers = numbers.masked_fill(is_new[:, None], 0.0)
        window, matrix = self._shape.window, self._shape.matrix
        parts = torch.split(numbers, [math.prod(window), math.prod(matrix)], 1)
        return DeltaState(parts[0].reshape(-1, *window), parts[1].reshape(-1, *matrix))

    def _write(self, members: list[int], index: int, state: DeltaState) -> None:
        places, part = self._place(index)
        pages = self._pages.write[members][:, places]
        # The first and the last page may hold numbers of neighbouring layers, too.
        rows = self._arena[pages]
        rows.flatten(1)[:, part] = torch.cat([each.flatten(1) for each in state], 1)
        self._arena[pages] = rows

    def _place(self, index: int) -> tuple[slice, slice]:
        """Return which of a sequence's pages have the layer's numbers, and where they lie there."""
        size, page = self._shape.state_size, self._arena.shape[1]
        first, last = index * size // page, ((index + 1) * size - 1) // page
        start = index * size - first * page
        return slice(first, last + 1), slice(start, start + size)
