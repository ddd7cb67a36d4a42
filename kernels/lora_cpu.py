"""LoRA for a CPU: few large batched products instead of one tiny product per tile.

A decode step reads each adapter's weights once, so its time is that of memory; thousands of calls
on single tiles would cost ten times as much. Adapters that are running are therefore copied into
*stacks*: one tensor `[A, R, width]` per layer and projection over all adapters of the same shape,
in which an adapter keeps its slot for as long as it is used step after step. Segments in
neighbouring slots then take one batched product per site (q, k and v share their input, so do
gate and up) and one per output. Adapters that find no room in a stack use their tiles in place.

The result is `lora_shrink` followed by `lora_expand`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kernels.lora_table import NUM_PROJECTIONS, LoraBatch, LoraTable, Projection

# Segments of up to this many rows are padded to the longest of their run without a second thought.
_MAX_FREE_ROWS = 8

# Projections that read the same input, in the table's order.
_SITES = (
    (Projection.Q, Projection.K, Projection.V),
    (Projection.O,),
    (Projection.GATE, Projection.UP),
    (Projection.DOWN,),
)

Matrix = tuple[torch.Tensor, torch.Tensor, float]  # A [R, in], B [R, out], scale
Shape = tuple[int, ...]  # rank rows of each projection


class _TableView:
    """A LoraTable's tiles as matrices over the arena; neighbouring tiles become one matrix."""

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
        """Most rank rows that any layer has, for each projection."""
        start, tiles = self._start[adapter], self._num_tiles[adapter]
        rows = self.table.rows[start : start + num_layers * NUM_PROJECTIONS * tiles]
        return tuple(rows.view(num_layers, NUM_PROJECTIONS, tiles).sum(-1).amax(0).tolist())

    def matrices(self, adapter: int, num_layers: int) -> list[list[Matrix]]:
        """[layer * 7 + projection] -> the adapter's matrices there."""
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
        return (
            self._flat[a : a + rows * in_width].view(rows, in_width),
            self._flat[b : b + rows * out_width].view(rows, out_width),
            run[3],
        )


def _continues(
    run: list[float], tile: tuple[int, int, float], in_width: int, out_width: int
) -> bool:
    a, b, rows, scale = run
    return tile == (a + rows * in_width, b + rows * out_width, scale)


class _Stack:
    """Adapters of one shape, side by side. Slots 0 to len(keys) - 1 are in use."""

    def __init__(self, shape: Shape, widths: Sequence[tuple[int, int]], num_layers: int) -> None:
        self.shape, self._widths, self._num_layers = shape, widths, num_layers
        self.keys: list[Hashable] = []
        self._capacity = 0
        self._a: list[torch.Tensor] = []  # [layer * 4 + site]        [capacity, sum of R, in]
        self._b: list[torch.Tensor] = []  # [layer * 7 + projection]  [capacity, R, out]
        self.num_bytes_each = (
            4 * num_layers * sum(rank * sum(pair) for rank, pair in zip(shape, widths, strict=True))
        )
        # In use, as batched products want them: A transposed.
        self.a_t: list[torch.Tensor] = []
        self.b: list[torch.Tensor] = []

    def add(self, key: Hashable, matrices: list[list[Matrix]]) -> None:
        slot = len(self.keys)
        if slot == self._capacity:
            self._reserve(max(4, 2 * slot))
        self.keys.append(key)
        for layer in range(self._num_layers):
            for site, projections in enumerate(_SITES):
                first = 0
                for projection in projections:
                    entry = layer * NUM_PROJECTIONS + projection
                    rank = self.shape[projection]
                    a = self._a[layer * len(_SITES) + site][slot, first : first + rank]
                    _fill(a, self._b[entry][slot], matrices[entry])
                    first += rank
        self._narrow()

    def discard(self, key: Hashable) -> None:
        """Free the key's slot; the last one moves into it."""
        slot, last = self.keys.index(key), len(self.keys) - 1
        moved = self.keys.pop()
        if slot != last:
            self.keys[slot] = moved
            for tensor in (*self._a, *self._b):
                tensor[slot].copy_(tensor[last])
        self._narrow()

    def _reserve(self, capacity: int) -> None:
        def grown(old: list[torch.Tensor], i: int, rows: int, width: int) -> torch.Tensor:
            tensor = torch.empty(capacity, rows, width)
            if self._capacity:
                tensor[: self._capacity] = old[i]
            return tensor

        a, b = [], []
        for layer in range(self._num_layers):
            for site, projections in enumerate(_SITES):
                rows = sum(self.shape[p] for p in projections)
                index = layer * len(_SITES) + site
                a.append(grown(self._a, index, rows, self._widths[projections[0]][0]))
            for p in range(NUM_PROJECTIONS):
                index = layer * NUM_PROJECTIONS + p
                b.append(grown(self._b, index, self.shape[p], self._widths[p][1]))
        self._a, self._b, self._capacity = a, b, capacity

    def _narrow(self) -> None:
        used = len(self.keys)
        self.a_t = [tensor[:used].transpose(1, 2) for tensor in self._a]
        self.b = [tensor[:used] for tensor in self._b]


def _fill(a: torch.Tensor, b: torch.Tensor, matrices: list[Matrix]) -> None:
    """Write matrices under one another into a [R, in] and b [R, out]; the scale goes into a."""
    first = 0
    for matrix_a, matrix_b, scale in matrices:
        end = first + matrix_a.shape[0]
        torch.mul(matrix_a, scale, out=a[first:end])
        b[first:end].copy_(matrix_b)
        first = end
    a[first:].zero_()
    b[first:].zero_()


@dataclass(frozen=True, slots=True)
class _Run:
    """Segments in neighbouring slots of a stack, `per_slot` rows for each.

    slots       the first and one past the last
    gather      [A * C] int64 rows of x, C for each slot; padding repeats some row
    valid       [N] int64 places of gather that are no padding; None: all are
    rows        [N] int64 the rows of y that they are added to
    whole_from  the rows are C for each slot in order, beginning here: no gathering; else -1
    """

    stack: _Stack
    slots: tuple[int, int]
    per_slot: int
    gather: torch.Tensor
    valid: torch.Tensor | None
    rows: torch.Tensor
    whole_from: int


class CpuLoraStep:
    """One step's adapters, ready to be added to each layer's outputs."""

    def __init__(
        self, stacked: list[_Run], loose: list[tuple[int, int, list[list[Matrix]]]]
    ) -> None:
        self._stacked, self._loose = stacked, loose

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
        for run in self._stacked:
            _add_run(run, x, y, layer, projections, out_offsets)
        for start, end, matrices in self._loose:
            for i, projection in enumerate(projections):
                target = y[start:end, out_offsets[i] : out_offsets[i + 1]]
                for a, b, scale in matrices[layer * NUM_PROJECTIONS + projection]:
                    target.addmm_(x[start:end] @ a.T, b, alpha=scale)


def _add_run(
    run: _Run,
    x: torch.Tensor,
    y: torch.Tensor,
    layer: int,
    projections: tuple[int, ...],
    out_offsets: tuple[int, ...],
) -> None:
    stack, first, count = run.stack, run.whole_from, run.gather.shape[0]
    low, high = run.slots
    a_t = stack.a_t[layer * len(_SITES) + _SITES.index(projections)][low:high]
    if not a_t.shape[2]:  # [A, in, sum of R]
        return
    own = x[first : first + count] if first >= 0 else x.index_select(0, run.gather)
    h = torch.bmm(own.view(-1, run.per_slot, x.shape[1]), a_t)  # [A, C, sum of R]
    column = 0
    for i, projection in enumerate(projections):
        rank = stack.shape[projection]
        if not rank:
            continue
        b = stack.b[layer * NUM_PROJECTIONS + projection][low:high]
        part = torch.bmm(h[:, :, column : column + rank], b).flatten(0, 1)  # [A * C, out]
        column += rank
        target = y[:, out_offsets[i] : out_offsets[i + 1]]
        if first >= 0:
            target[first : first + count].add_(part)
        else:
            part = part if run.valid is None else part.index_select(0, run.valid)
            target.index_add_(0, run.rows, part)


class CpuLora:
    """Keeps the stacks of the adapters that are decoding.

    arena      [P, page_elems] fp32
    widths     (in, out) of the seven projections
    max_bytes  of all stacks together; adapters beyond it use their tiles in place
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
        self._max_bytes = max_bytes
        self._stacks: dict[Shape, _Stack] = {}
        self._stack_of: dict[Hashable, _Stack] = {}
        self._view: _TableView | None = None

    def arrange(self, keys: Iterable[Hashable]) -> dict[Hashable, int]:
        """Forget adapters not in `keys`; a rank for those that have a slot, in slot order.

        Rows sorted so need no gathering; keys without a rank best come after them.
        """
        wanted = set(keys)
        for key in [key for key in self._stack_of if key not in wanted]:
            self._stack_of.pop(key).discard(key)
        self._stacks = {shape: stack for shape, stack in self._stacks.items() if stack.keys}
        order = (key for stack in self._stacks.values() for key in stack.keys)
        return {key: rank for rank, key in enumerate(order)}

    def prepare(self, lora: LoraBatch, keys: Sequence[Hashable]) -> CpuLoraStep:
        """The step's products.

        keys  what each virtual adapter of the table *is*: equal keys have equal weights for ever
        """
        if self._view is None or self._view.table is not lora.table:
            self._view = _TableView(lora.table, self._arena, self._widths)
        bounds, adapters = lora.seg_indptr.tolist(), lora.seg_adapter.tolist()
        loose = []
        segments: dict[Shape, list[tuple[int, int, int]]] = {}  # (slot, first row, end row)
        for g, adapter in enumerate(adapters):
            if adapter < 0 or bounds[g] == bounds[g + 1]:
                continue
            if self._has_slot(adapter, keys[adapter]):
                stack = self._stack_of[keys[adapter]]
                slot = stack.keys.index(keys[adapter])
                segments.setdefault(stack.shape, []).append((slot, bounds[g], bounds[g + 1]))
            else:
                matrices = self._view.matrices(adapter, self._num_layers)
                loose.append((bounds[g], bounds[g + 1], matrices))
        runs = [
            _make_run(self._stacks[shape], own)
            for shape, members in segments.items()
            for own in _split_into_runs(sorted(members))
        ]
        return CpuLoraStep(runs, loose)

    def _has_slot(self, adapter: int, key: Hashable) -> bool:
        """Whether the adapter is in a stack now; puts it there when there is room."""
        if key in self._stack_of:
            return True
        assert self._view is not None
        shape = self._view.rank_rows(adapter, self._num_layers)
        stack = self._stacks.get(shape) or _Stack(shape, self._widths, self._num_layers)
        used = sum(len(s.keys) * s.num_bytes_each for s in self._stacks.values())
        if used + stack.num_bytes_each > self._max_bytes:
            return False
        stack.add(key, self._view.matrices(adapter, self._num_layers))
        self._stacks[shape] = stack
        self._stack_of[key] = stack
        return True


def _split_into_runs(segments: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut (slot, first row, end row), sorted by slot, into runs without gaps.

    A run's segments are padded to its longest; padding may double the work, not more.
    """
    runs: list[list[tuple[int, int, int]]] = []
    total = longest = 0
    for segment in segments:
        slot, start, end = segment
        total, longest = total + end - start, max(longest, end - start)
        padded = longest * (len(runs[-1]) + 1) if runs else 0
        if (
            runs
            and slot == runs[-1][-1][0] + 1
            and (longest <= _MAX_FREE_ROWS or padded <= 2 * total)
        ):
            runs[-1].append(segment)
        else:
            runs.append([segment])
            total = longest = end - start
    return runs


def _make_run(stack: _Stack, segments: list[tuple[int, int, int]]) -> _Run:
    per_slot = max(end - start for _, start, end in segments)
    gather: list[int] = []
    valid: list[int] = []
    rows: list[int] = []
    for i, (_, start, end) in enumerate(segments):
        length = end - start
        gather += [*range(start, end), *[start] * (per_slot - length)]
        valid += range(i * per_slot, i * per_slot + length)
        rows += range(start, end)
    is_whole = gather == list(range(gather[0], gather[0] + len(gather)))
    is_full = len(valid) == len(gather)
    return _Run(
        stack=stack,
        slots=(segments[0][0], segments[-1][0] + 1),
        per_slot=per_slot,
        gather=torch.tensor(gather),
        valid=None if is_full else torch.tensor(valid),
        rows=torch.tensor(rows),
        whole_from=gather[0] if is_whole else -1,
    )
