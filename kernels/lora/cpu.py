"""LoRA for a CPU: few large products instead of one tiny product per tile.

A decode step reads each adapter's weights once, so memory bandwidth bounds its time; thousands of
calls on single tiles would take ten times as long. Running adapters are therefore copied into
`Stacks`, where one call computes all adapters of one shape:

- Few rows per adapter (a decode): `torch.embedding_bag` computes weighted sums of a table's rows.
  With the table Aᵀ and the weights x, the sums are A x. With the table Bᵀ and these as weights, the
  sums are the output. torch compiles this loop for the width at its first run; it reads at the
  speed of memory, which torch's batched products do not for one row.
- Many rows (a prefill): batched products over adjacent slots, added in place.

Adapters for which no stack has room use their tiles in place. The result equals `lora_shrink`
followed by `lora_expand`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.huge_pages import empty_fp32
from kernels.lora.stacks import SITES, Matrix, Shape, SiteBags, Stack, Stacks
from kernels.lora.table import NUM_PROJECTIONS, LoraBatch, LoraTable

# Largest number of rows of a segment that uses `embedding_bag`; longer segments use batched
# products.
_FEW_ROWS = 4

Segment = tuple[int, int, int]  # slot, first row, end row


class _TableView:
    """A LoraTable's tiles as matrices over the arena; adjacent tiles become one matrix."""

    def __init__(
        self, table: LoraTable, arena: torch.Tensor, widths: Sequence[tuple[int, int]]
    ) -> None:
        self.table = table
        self._flat, self._widths = arena.view(-1), widths
        self._start = table.entry_start.tolist()
        self._num_tiles = table.num_tiles.tolist()
        self._columns = (table.a_offset, table.b_offset, table.rows, table.scale)
        self._matrices: dict[int, list[list[Matrix]]] = {}

    def rank_rows(self, adapter: int, num_layers: int) -> Shape:
        """Return for each projection the most rank rows that any layer has."""
        start, tiles = self._start[adapter], self._num_tiles[adapter]
        rows = self.table.rows[start : start + num_layers * NUM_PROJECTIONS * tiles]
        return tuple(rows.view(num_layers, NUM_PROJECTIONS, tiles).sum(-1).amax(0).tolist())

    def matrices(self, adapter: int, num_layers: int) -> list[list[Matrix]]:
        """Return the adapter's matrices at [layer * 8 + projection]."""
        found = self._matrices.get(adapter)
        if found is None:
            found = self._matrices[adapter] = self._read(adapter, num_layers)
        return found

    def _read(self, adapter: int, num_layers: int) -> list[list[Matrix]]:
        start, tiles = self._start[adapter], self._num_tiles[adapter]
        end = start + num_layers * NUM_PROJECTIONS * tiles
        a, b, rows, scale = (column[start:end].tolist() for column in self._columns)
        result = []
        for entry in range(num_layers * NUM_PROJECTIONS):
            in_width, out_width = self._widths[entry % NUM_PROJECTIONS]
            runs: list[list[float]] = []  # [a, b, rows, scale]
            for i in range(entry * tiles, (entry + 1) * tiles):
                if a[i] < 0:
                    continue
                if runs and _continues(runs[-1], (a[i], b[i], scale[i]), in_width, out_width):
                    runs[-1][2] += rows[i]
                else:
                    runs.append([a[i], b[i], rows[i], scale[i]])
            result.append([self._matrix(run, in_width, out_width) for run in runs])
        return result

    def _matrix(self, run: list[float], in_width: int, out_width: int) -> Matrix:
        a, b, rows = int(run[0]), int(run[1]), int(run[2])
        # Tiles in E4M3 are converted: torch multiplies none on a CPU.
        return (
            self._flat[a : a + rows * in_width].view(rows, in_width).float(),
            self._flat[b : b + rows * out_width].view(rows, out_width).float(),
            run[3],
        )


def _continues(
    run: list[float], tile: tuple[int, int, float], in_width: int, out_width: int
) -> bool:
    a, b, rows, scale = run
    return tile == (a + rows * in_width, b + rows * out_width, scale)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of x and y that are computed together.

    first, count  adjacent rows in order; or
    index         [count] int64, if they are not adjacent
    """

    first: int
    count: int
    index: torch.Tensor | None

    @classmethod
    def of(cls, rows: list[int]) -> _Rows:
        is_range = rows == list(range(rows[0], rows[0] + len(rows)))
        return cls(rows[0], len(rows), None if is_range else torch.tensor(rows))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        if self.index is not None:
            return x.index_select(0, self.index)
        if self.count == x.shape[0]:
            return x
        return x[self.first : self.first + self.count]

    def add(self, y: torch.Tensor, part: torch.Tensor) -> None:
        if self.index is not None:
            y.index_add_(0, self.index, part)
        elif self.count == y.shape[0]:
            y.add_(part)
        else:
            y[self.first : self.first + self.count].add_(part)


@dataclass(frozen=True, slots=True)
class _Bags:
    """Segments of few rows, computed with `embedding_bag`.

    sites  [layer * 4 + site]
    """

    sites: list[SiteBags | None]
    rows: _Rows

    @classmethod
    def of(cls, stack: Stack, segments: list[Segment]) -> _Bags:
        slots = tuple(slot for slot, start, end in segments for _ in range(start, end))
        rows = [row for _, start, end in segments for row in range(start, end)]
        return cls(stack.bags(slots), _Rows.of(rows))

    def add(self, x: torch.Tensor, y: torch.Tensor, layer: int, site: int) -> None:
        bags = self.sites[layer * len(SITES) + site]
        if bags is None:
            return
        x = self.rows.take(x).reshape(-1)
        h = _sum_rows(bags.a_rows, bags.a_index, bags.a_start, x).view(-1)  # [T * rank]
        if bags.h_index is not None:
            h = h.index_select(0, bags.h_index)
        part = _sum_rows(bags.b_rows, bags.b_index, bags.b_start, h)
        self.rows.add(y, part.view(-1, bags.out_width))


def _sum_rows(
    table: torch.Tensor, index: torch.Tensor, start: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return as row i the sum of weights[j] * table[index[j]], j from start[i] to start[i + 1]."""
    # Called 240 times a step: keyword arguments would cost a microsecond each. Mode 0 is a sum.
    return torch.embedding_bag(table, index, start, False, 0, False, weights)[0]


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments of many rows in adjacent slots, padded to `per_slot` rows each.

    slots   the first and one past the last
    inputs  per_slot rows of x for each slot; padding repeats some row
    valid   [N] int64 rows of `inputs` that are not padding; None: all
    rows    rows of y to which the results are added
    """

    stack: Stack
    scratch: _Scratch
    slots: tuple[int, int]
    per_slot: int
    inputs: _Rows
    valid: torch.Tensor | None
    rows: _Rows

    @classmethod
    def of(cls, stack: Stack, segments: list[Segment], scratch: _Scratch) -> _Run:
        per_slot = max(end - start for _, start, end in segments)
        inputs: list[int] = []
        valid: list[int] = []
        for i, (_, start, end) in enumerate(segments):
            length = end - start
            inputs += [*range(start, end), *[start] * (per_slot - length)]
            valid += range(i * per_slot, i * per_slot + length)
        return cls(
            stack=stack,
            scratch=scratch,
            slots=(segments[0][0], segments[-1][0] + 1),
            per_slot=per_slot,
            inputs=_Rows.of(inputs),
            valid=None if len(valid) == len(inputs) else torch.tensor(valid),
            rows=_Rows.of([row for _, start, end in segments for row in range(start, end)]),
        )

    def add(self, x: torch.Tensor, y: torch.Tensor, layer: int, site: int) -> None:
        stack, layout, (low, high) = self.stack, self.stack.sites[site], self.slots
        if not layout.rank:
            return
        a = stack.a[layer * len(SITES) + site][low:high]
        b = stack.b[layer * len(SITES) + site][low:high]
        h = torch.bmm(self.inputs.take(x).view(high - low, self.per_slot, -1), a)
        in_place = self.valid is None and self.rows.index is None
        part = self.rows.take(y) if in_place else y.new_zeros(self.inputs.count, y.shape[1])
        target = part.view(high - low, self.per_slot, -1)
        for i, (column, rank, row) in enumerate(layout.blocks):
            if rank:
                block = target[:, :, i * layout.width : (i + 1) * layout.width]
                _add_products(
                    block, h[:, :, column : column + rank], b[:, row : row + rank], self.scratch
                )
        if not in_place:
            self.rows.add(y, part if self.valid is None else part.index_select(0, self.valid))


class _Scratch:
    """Memory for short-lived products.

    Allocating some megabytes for each product takes as long as the product: the system maps
    and clears every page.
    """

    _MAX_ELEMENTS = 4 << 20

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def empty(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised fp32 tensor; the next call may return the same memory."""
        wanted = math.prod(shape)
        if wanted > self._MAX_ELEMENTS:
            return torch.empty(shape)
        if wanted > self._memory.numel():
            self._memory = empty_fp32(wanted)
        return self._memory[:wanted].view(shape)


def _add_products(y: torch.Tensor, h: torch.Tensor, b: torch.Tensor, scratch: _Scratch) -> None:
    """Add h [S, N, rank] @ b [S, rank, width] to y [S, N, width], in place.

    Adding within the product saves a pass over y. But if y is not contiguous, torch multiplies one
    matrix after another, each with all threads: for matrices this small, two threads then take
    three times as long as for a batched product.
    """
    if y.is_contiguous() or torch.get_num_threads() == 1:
        y.baddbmm_(h, b)
    else:
        y.add_(torch.bmm(h, b, out=scratch.empty(*y.shape)))


def _split_into_runs(segments: list[Segment]) -> list[list[Segment]]:
    """Cut segments, sorted by slot, into runs without gaps.

    A run's segments are padded to its longest, which at most doubles the work.
    """
    runs: list[list[Segment]] = []
    total = longest = 0
    for segment in segments:
        slot, start, end = segment
        total, longest = total + end - start, max(longest, end - start)
        if runs and slot == runs[-1][-1][0] + 1 and longest * (len(runs[-1]) + 1) <= 2 * total:
            runs[-1].append(segment)
        else:
            runs.append([segment])
            total = longest = end - start
    return runs


class CpuLoraStep:
    """One step's adapters, ready to be added to each layer's outputs."""

    def __init__(
        self, stacked: Sequence[_Bags | _Run], unstacked: list[tuple[int, int, list[list[Matrix]]]]
    ) -> None:
        self._stacked, self._unstacked = stacked, unstacked
        self.experts: Any = None  # adapters of routed experts, which others apply

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        layer: int,
        projections: tuple[int, ...],
        out_offsets: tuple[int, ...],
    ) -> None:
        """Add every row's adapter output for one site to `y`, in place.

        x            [T, in]
        y            [T, sum of out widths]
        projections  one of the four sites: (q, k, v), (o,), (gate, up), (down,)
        out_offsets  projection i writes y[:, out_offsets[i]:out_offsets[i + 1]]
        """
        site = SITES.index(projections)  # type: ignore[arg-type]
        for part in self._stacked:
            part.add(x, y, layer, site)
        for start, end, matrices in self._unstacked:
            for i, projection in enumerate(projections):
                target = y[start:end, out_offsets[i] : out_offsets[i + 1]]
                for a, b, scale in matrices[layer * NUM_PROJECTIONS + projection]:
                    target.addmm_(x[start:end] @ a.T, b, alpha=scale)


class CpuLora:
    """Keeps the stacks of the running adapters.

    arena      [P, page_elems] fp32, or its view as E4M3
    widths     (in, out) of the projections
    max_bytes  of all stacks together; other adapters use their tiles in place
    """

    def __init__(
        self,
        *,
        arena: torch.Tensor,
        widths: Sequence[tuple[int, int]],
        num_layers: int,
        max_bytes: int,
    ) -> None:
        self._arena, self._widths, self._num_layers = arena, widths, num_layers
        self._stacks = Stacks(widths=widths, num_layers=num_layers, max_bytes=max_bytes)
        self._view: _TableView | None = None
        self._scratch = _Scratch()

    def arrange(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        """Return the sort order of those `keys` that have a slot: by slot.

        Rows in this order need no gathering; put keys without a slot after them.
        """
        wanted = set(keys)
        stacked = (key for key in self._stacks.keys() if key in wanted)
        return {key: rank for rank, key in enumerate(stacked)}

    def forget(self, is_meant: Callable[[Any], bool]) -> None:
        """Drop the copies of the adapters whose keys `is_meant` accepts."""
        for key in self._stacks.keys():
            if is_meant(key):
                self._stacks.discard(key)

    def prepare(self, lora: LoraBatch, keys: Sequence[Hashable]) -> CpuLoraStep:
        """Prepare the step's products.

        keys  identifies each virtual adapter of the table: equal keys always have equal weights
        """
        if self._view is None or self._view.table is not lora.table:
            self._view = _TableView(lora.table, self._arena, self._widths)
        self._stack(self._view, keys)
        bounds, adapters = lora.seg_indptr.tolist(), lora.seg_adapter.tolist()
        unstacked = []
        stacked: dict[Stack, list[Segment]] = {}
        for g, adapter in enumerate(adapters):
            start, end = bounds[g], bounds[g + 1]
            if adapter < 0 or start == end:
                continue
            stack = self._stacks.find(keys[adapter])
            if stack is None:
                unstacked.append((start, end, self._view.matrices(adapter, self._num_layers)))
            else:
                stacked.setdefault(stack, []).append((stack.slot(keys[adapter]), start, end))
        parts: list[_Bags | _Run] = []
        for stack, segments in stacked.items():
            few = [(s, start, end) for s, start, end in segments if end - start <= _FEW_ROWS]
            many = [(s, start, end) for s, start, end in segments if end - start > _FEW_ROWS]
            parts += [_Bags.of(stack, few)] if few else []
            parts += [_Run.of(stack, run, self._scratch) for run in _split_into_runs(sorted(many))]
        return CpuLoraStep(parts, unstacked)

    def _stack(self, view: _TableView, keys: Sequence[Hashable]) -> None:
        """Copy adapters that are in no stack yet, if there is room."""
        keep = set(keys)
        for adapter, key in enumerate(keys):
            if self._stacks.find(key) is None:
                shape = view.rank_rows(adapter, self._num_layers)
                self._stacks.add(key, shape, view.matrices(adapter, self._num_layers), keep)
