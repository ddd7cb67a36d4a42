"""The kernels' tables of a micro-batch: where in the pools its runs' A and B lie."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine.model.config import ModelConfig
from engine.training.parameters import AdapterLayout, Span, fused_of
from kernels.lora.table import Projection
from kernels.training import LoraSite
from kernels.training.pools import RANK_BLOCK
from kernels.training.uploads import upload

Array = np.ndarray[Any, Any]
# Elements that the kernels' wide loads need every A and every B to begin at a multiple of.
_WIDE = 8


@dataclass(frozen=True, slots=True)
class _RunTable:
    """One run's part of every table, as if its span began at 0.

    a, b, rank, scale  [modules of all layers], in the order of the sites; 0: not trained
    most, step         [sites] the largest rank, and what divides all of them and RANK_BLOCK
    is_aligned         [sites]
    """

    a: Array
    b: Array
    rank: Array
    scale: Array
    most: Array
    step: Array
    is_aligned: Array


class SiteTables:
    """The tables of the runs that share a micro-batch; kept for the next of the same.

    What a run's layout says is worked out once, so that new tables are a few sums over arrays:
    of 64 runs of an 8B model 2 ms, where placing each module for each run took half a second.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._device = device
        groups = [(i, each) for i in range(config.num_layers) for each in fused_of(config, i)]
        self._groups, self._per_layer = groups, len(groups) // config.num_layers
        self._bounds = [
            tuple(itertools.accumulate((config.widths(i)[p][1] for p in projections), initial=0))
            for i, projections in groups
        ]
        self._run_tables: WeakKeyDictionary[AdapterLayout, _RunTable] = WeakKeyDictionary()
        # The layouts themselves, so that no later one takes the place of one that is gone.
        self._known: list[tuple[AdapterLayout, Span]] = []
        self._sites: list[list[LoraSite]] = []

    def of(self, runs: list[tuple[AdapterLayout, Span]]) -> list[list[LoraSite]]:
        """[layer][base matrix] of these runs, one a segment."""
        known = self._known
        if len(known) != len(runs) or any(
            layout is not own or span != at
            for (layout, span), (own, at) in zip(runs, known, strict=True)
        ):
            self._known, self._sites = list(runs), self._make(runs)
        return self._sites

    def _make(self, runs: list[tuple[AdapterLayout, Span]]) -> list[list[LoraSite]]:
        tables = [self._run_table(layout) for layout, _ in runs]
        firsts = np.array([span.first for _, span in runs], np.int64)
        rank = np.stack([table.rank for table in tables], axis=1)
        offsets = np.stack([[table.a for table in tables], [table.b for table in tables]])
        offsets = np.where(rank > 0, offsets.transpose(0, 2, 1) + firsts, 0)
        a, b = self._upload(offsets)
        ranks = self._upload(rank)
        scales = self._upload(np.stack([table.scale for table in tables], axis=1))
        most = np.max([table.most for table in tables], axis=0).tolist()
        step = np.gcd.reduce([table.step for table in tables], axis=0).tolist()
        is_aligned = np.all([table.is_aligned for table in tables], axis=0)
        is_aligned &= bool((firsts % _WIDE == 0).all())
        sites, row = [], 0
        for number, bounds in enumerate(self._bounds):
            own = slice(row, row + len(bounds) - 1)
            row = own.stop
            sites.append(
                LoraSite(
                    bounds=bounds,
                    a=a[own],
                    b=b[own],
                    rank=ranks[own],
                    scale=scales[own],
                    max_rank=most[number],
                    rank_step=step[number],
                    aligned=bool(is_aligned[number]),
                )
            )
        count = self._per_layer
        return [sites[i : i + count] for i in range(0, len(sites), count)]

    def _upload(self, table: Array) -> torch.Tensor:
        return upload(torch.from_numpy(np.ascontiguousarray(table)), self._device)

    def _run_table(self, layout: AdapterLayout) -> _RunTable:
        if layout not in self._run_tables:
            self._run_tables[layout] = _run_table(layout, self._groups)
        return self._run_tables[layout]


def _run_table(
    layout: AdapterLayout, groups: list[tuple[int, tuple[Projection, ...]]]
) -> _RunTable:
    cells = [
        layout.placement(0, layer, projection) or (0, 0, 0, 0.0)
        for layer, projections in groups
        for projection in projections
    ]
    a, b, rank, scale = zip(*cells, strict=True)
    starts = list(itertools.accumulate((len(each) for _, each in groups), initial=0))[:-1]
    ranks = np.array(rank, np.int32)
    offsets = np.array([a, b], np.int64)
    is_off = (offsets % _WIDE != 0).any(axis=0)
    return _RunTable(
        a=offsets[0],
        b=offsets[1],
        rank=ranks,
        scale=np.array(scale, np.float32),
        most=np.maximum.reduceat(ranks, starts),
        step=np.gcd(np.gcd.reduceat(ranks, starts), RANK_BLOCK),
        is_aligned=~np.logical_or.reduceat(is_off, starts),
    )
