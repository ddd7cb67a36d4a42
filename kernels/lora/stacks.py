"""Stacks: copies of adapters in the layout that a CPU reads fastest, outside the arena.

One stack for all adapters of one shape. For each layer and site (q k v, o, gate up, down) it has

    A  [adapters, in, R]              transposed, scaled; R: rank rows of all the site's projections
    B  [adapters, blocks * r, width]  block j: columns j * width to (j + 1) * width of the output

`width` cuts every projection's output into whole blocks. What finds no room uses its tiles.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch

from kernels.huge_pages import empty_fp32
from kernels.lora.table import NUM_PROJECTIONS, Projection

# Projections that read the same input, in the table's order.
SITES = (
    (Projection.Q, Projection.K, Projection.V),
    (Projection.O,),
    (Projection.GATE, Projection.UP),
    (Projection.DOWN,),
)

_FEWEST_SLOTS = 4

Matrix = tuple[torch.Tensor, torch.Tensor, float]  # A [R, in], B [R, out], scale
Shape = tuple[int, ...]  # rank rows of each projection


@dataclass(frozen=True, slots=True)
class _Member:
    """A projection's place in its site: columns of A, rows and blocks of B."""

    projection: int
    rank: int
    first_column: int
    first_row: int
    num_blocks: int


class Site:
    """The layout of adapters of one shape at one site: projections that share an input.

    in_width   width of that input
    rank       rank rows of all projections together
    width      width of a block: the widest that cuts every projection's output into whole blocks
    num_rows   rows of B: for each block the rank rows of its projection
    blocks     (first column of A, rank, first row of B) of each block, in the output's order
    """

    def __init__(self, index: int, shape: Shape, widths: Sequence[tuple[int, int]]) -> None:
        projections = SITES[index]
        self.in_width = widths[projections[0]][0]
        self.width = math.gcd(*(widths[p][1] for p in projections))
        self.rank = self.num_rows = 0
        self.members: list[_Member] = []
        self.blocks: list[tuple[int, int, int]] = []
        for p in projections:
            rank, num_blocks = shape[p], widths[p][1] // self.width
            self.members.append(_Member(p, rank, self.rank, self.num_rows, num_blocks))
            for _ in range(num_blocks):
                self.blocks.append((self.rank, rank, self.num_rows))
                self.num_rows += rank
            self.rank += rank


class BagIndex:
    """Which rows of a stack `torch.embedding_bag` sums; each row of x has one of its adapters.

    All are int32, for each site. `a_index` [T * in] are the rows of A to sum for each row of x,
    with the weights x. `b_index` are the rows of B to sum for each row of x and block, with the
    first sums as weights, picked by `h_index` (None: in order). A's bags begin at `a_start`, B's
    at `b_start`.
    """

    def __init__(self, sites: Sequence[Site], slots: Sequence[int]) -> None:
        slot = torch.tensor(slots, dtype=torch.int32)[:, None]
        row = torch.arange(len(slots), dtype=torch.int32)[:, None]
        self.a_index, self.a_start = [], []
        self.b_index, self.b_start = [], []
        self.h_index: list[torch.Tensor | None] = []
        for site in sites:
            self.a_index.append((slot * site.in_width + _range(site.in_width)).flatten())
            self.a_start.append(row.flatten() * site.in_width)
            self.b_index.append((slot * site.num_rows + _range(site.num_rows)).flatten())
            first_rows = torch.tensor([first for _, _, first in site.blocks], dtype=torch.int32)
            self.b_start.append((row * site.num_rows + first_rows).flatten())
            columns = torch.tensor(
                [first + r for first, rank, _ in site.blocks for r in range(rank)],
                dtype=torch.int32,
            )
            is_identity = site.num_rows == site.rank
            self.h_index.append(None if is_identity else (row * site.rank + columns).flatten())


@dataclass(frozen=True, slots=True)
class SiteBags:
    """The sums for one site of one layer: a `BagIndex` and the tables that it indexes.

    h_index    [T * num_rows] int32; None: A's sums are B's weights in order
    out_width  width of the site's output
    """

    a_rows: torch.Tensor
    a_index: torch.Tensor
    a_start: torch.Tensor
    h_index: torch.Tensor | None
    b_rows: torch.Tensor
    b_index: torch.Tensor
    b_start: torch.Tensor
    out_width: int


def _range(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32)


class Stack:
    """Adapters of one shape. Slots 0 to len(keys) - 1 are in use.

    sites          the layout of each of the four sites
    num_bytes_each bytes of one adapter
    a              [layer * 4 + site]  [capacity, in, rank], already multiplied by the scale
    b              [layer * 4 + site]  [capacity, num_rows, width]

    All layers of a site share one block of memory.
    """

    def __init__(self, shape: Shape, widths: Sequence[tuple[int, int]], num_layers: int) -> None:
        self.sites = [Site(index, shape, widths) for index in range(len(SITES))]
        self.keys: list[Hashable] = []
        self.capacity = 0
        elements = [s.in_width * s.rank + s.num_rows * s.width for s in self.sites]
        self.num_bytes_each = max(1, 4 * num_layers * sum(elements))
        self._num_layers = num_layers
        self._slots: dict[Hashable, int] = {}
        self._bags: tuple[tuple[int, ...], list[SiteBags | None]] | None = None
        self._pieces = [
            torch.empty(num_layers, 0, *matrix)
            for site in self.sites
            for matrix in ((site.in_width, site.rank), (site.num_rows, site.width))
        ]
        self.a: list[torch.Tensor] = []
        self.b: list[torch.Tensor] = []

    def slot(self, key: Hashable) -> int:
        return self._slots[key]

    def bags(self, slots: tuple[int, ...]) -> list[SiteBags | None]:
        """Return the sums at [layer * 4 + site] for these slots; None where adapters have nothing.

        A decode asks for the same slots step after step, so what does not depend on its rows is
        computed once.
        """
        if self._bags is None or self._bags[0] != slots:
            self._bags = slots, self._make_bags(BagIndex(self.sites, slots))
        return self._bags[1]

    def _make_bags(self, index: BagIndex) -> list[SiteBags | None]:
        bags: list[SiteBags | None] = []
        for i, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            s = i % len(SITES)
            site = self.sites[s]
            own = SiteBags(
                a_rows=a.flatten(0, 1),
                a_index=index.a_index[s],
                a_start=index.a_start[s],
                h_index=index.h_index[s],
                b_rows=b.flatten(0, 1),
                b_index=index.b_index[s],
                b_start=index.b_start[s],
                out_width=site.width * len(site.blocks),
            )
            bags.append(own if site.rank else None)
        return bags

    def resize(self, capacity: int) -> None:
        used = len(self.keys)
        # One by one and without views of the old memory, so that only one block exists twice.
        self.a, self.b, self._bags = [], [], None
        for i, old in enumerate(self._pieces):
            self._pieces[i] = empty_fp32(self._num_layers, capacity, *old.shape[2:])
            self._pieces[i][:, :used] = old[:, :used]
        self.capacity = capacity
        layers = range(self._num_layers)
        self.a = [piece[layer] for layer in layers for piece in self._pieces[::2]]
        self.b = [piece[layer] for layer in layers for piece in self._pieces[1::2]]

    def add(self, key: Hashable, matrices: list[list[Matrix]]) -> None:
        """Copy an adapter's matrices at [layer * 8 + projection] to a slot; one must be free."""
        slot = self._slots[key] = len(self.keys)
        self.keys.append(key)
        for layer in range(self._num_layers):
            for i, site in enumerate(self.sites):
                a, b = self.a[layer * len(SITES) + i], self.b[layer * len(SITES) + i]
                for member in site.members:
                    own = matrices[layer * NUM_PROJECTIONS + member.projection]
                    _fill(member, a[slot], b[slot], own)

    @torch.inference_mode()  # the memory was made in it; `unregister` calls this between steps
    def discard(self, key: Hashable) -> None:
        """Free the key's slot; the last one moves into it."""
        slot, last = self._slots.pop(key), len(self.keys) - 1
        moved = self.keys.pop()
        if slot != last:
            self.keys[slot], self._slots[moved] = moved, slot
            for piece in self._pieces:
                piece[:, slot] = piece[:, last]


def _fill(member: _Member, a: torch.Tensor, b: torch.Tensor, matrices: list[Matrix]) -> None:
    """Write matrices side by side into their part of a [in, rank] and b [num_rows, width]."""
    column, row, count = member.first_column, member.first_row, member.num_blocks
    a = a[:, column : column + member.rank]
    b = b[row : row + count * member.rank].view(count, member.rank, b.shape[1])
    first = 0
    for matrix_a, matrix_b, scale in matrices:
        end = first + matrix_a.shape[0]
        torch.mul(matrix_a.T, scale, out=a[:, first:end])
        b[:, first:end] = matrix_b.view(end - first, count, b.shape[2]).transpose(0, 1)
        first = end
    a[:, first:].zero_()
    b[:, first:].zero_()


class Stacks:
    """All stacks. An adapter stays until its room is needed; the least recently used goes first.

    max_bytes  of all stacks together, free slots included
    """

    def __init__(
        self, *, widths: Sequence[tuple[int, int]], num_layers: int, max_bytes: int
    ) -> None:
        self._widths, self._num_layers, self._max_bytes = widths, num_layers, max_bytes
        self._stacks: dict[Shape, Stack] = {}
        self._shapes: OrderedDict[Hashable, Shape] = OrderedDict()  # least recently used first

    def keys(self) -> list[Hashable]:
        """Return all adapters, those of a stack in the order of their slots."""
        return [key for stack in self._stacks.values() for key in stack.keys]

    def find(self, key: Hashable) -> Stack | None:
        """Return the stack that has the adapter, and mark it as used now."""
        shape = self._shapes.get(key)
        if shape is None:
            return None
        self._shapes.move_to_end(key)
        return self._stacks[shape]

    def num_bytes(self) -> int:
        return sum(stack.capacity * stack.num_bytes_each for stack in self._stacks.values())

    def add(
        self,
        key: Hashable,
        shape: Shape,
        matrices: list[list[Matrix]],
        keep: Collection[Hashable],
    ) -> None:
        """Copy the adapter to a stack if there is room; adapters not in `keep` may be dropped.

        Slots of other adapters may change.
        """
        stack = self._stacks.get(shape) or Stack(shape, self._widths, self._num_layers)
        if not self._make_room(stack, keep):
            return
        self._stacks[shape] = stack
        self._shapes[key] = shape
        stack.add(key, matrices)

    def discard(self, key: Hashable) -> None:
        """Free the adapter's slot; those of others may change."""
        self._stacks[self._shapes.pop(key)].discard(key)

    def _make_room(self, stack: Stack, keep: Collection[Hashable]) -> bool:
        if stack.num_bytes_each > self._max_bytes:
            return False
        unused = (key for key in list(self._shapes) if key not in keep)
        while len(stack.keys) == stack.capacity:
            if self._max_bytes - self.num_bytes() < stack.num_bytes_each:
                self._trim(stack)
            spare = (self._max_bytes - self.num_bytes()) // stack.num_bytes_each
            if spare > 0:
                wanted = max(_FEWEST_SLOTS, 2 * stack.capacity)
                stack.resize(min(wanted, stack.capacity + spare))
                break
            victim = next(unused, None)
            if victim is None:
                return False
            self.discard(victim)
        return True

    def _trim(self, wanting: Stack) -> None:
        """Release the free slots of other stacks."""
        for stack in self._stacks.values():
            if stack is not wanting and len(stack.keys) < stack.capacity:
                stack.resize(len(stack.keys))
        self._stacks = {shape: s for shape, s in self._stacks.items() if s.keys or s is wanting}
