"""The places of the runs' parameters in the pools.

All runs share five flat tensors of the same layout (`kernels.training.Pools`). A run owns one span
of each: its adapter's A and B, module after module, in the order in which PEFT makes them.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.training.errors import RunRefused
from engine.training.run import RunSettings
from kernels.lora.table import FUSED, Projection
from kernels.training import SPAN, Placement, Pools

# Elements that are copied between host and device at a time, where somebody else has to have turns.
_PIECE = 1 << 23
# Elements that every A and every B begins at a multiple of, for the kernels' wide loads.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Span:
    """Elements first to first + size of every pool."""

    first: int
    size: int

    @property
    def elements(self) -> slice:
        return slice(self.first, self.first + self.size)


class SpanAllocator:
    """Gives and takes back spans of the pools; first fit, neighbours are joined."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // SPAN * SPAN
        self._starts = [0] if self.capacity else []
        self._sizes = {0: self.capacity} if self.capacity else {}
        self._given: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Elements that are given away."""
        return sum(self._given.values())

    def take(self, size: int) -> Span | None:
        """Take a span of `size` elements, a multiple of SPAN; None: there is no room now."""
        for start in self._starts:
            left = self._sizes[start] - size
            if left < 0:
                continue
            self._starts.remove(start)
            del self._sizes[start]
            if left:
                bisect.insort(self._starts, start + size)
                self._sizes[start + size] = left
            self._given[start] = size
            return Span(start, size)
        return None

    def give(self, span: Span) -> None:
        """Take back a span that `take` returned."""
        first, size = span.first, self._given.pop(span.first)
        assert size == span.size
        place = bisect.bisect(self._starts, first)
        if place < len(self._starts) and self._starts[place] == first + size:
            following = self._starts.pop(place)
            size += self._sizes.pop(following)
        if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] == first:
            first = self._starts.pop(place - 1)
            size += self._sizes.pop(first)
        bisect.insort(self._starts, first)
        self._sizes[first] = size

    def check_integrity(self) -> None:
        """Assert that every element is free or given, once, and that free neighbours are joined."""
        spans = sorted([*self._sizes.items(), *self._given.items()])
        end = 0
        for start, size in spans:
            assert start == end and size > 0 and size % SPAN == 0, spans
            end += size
        assert end == self.capacity, spans
        assert sorted(self._sizes) == self._starts
        for start, size in self._sizes.items():
            assert start + size not in self._sizes, "free neighbours"


@dataclass(frozen=True, slots=True)
class Factor:
    """An A or a B within its run's span."""

    offset: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class AdapterLayout:
    """The places of a run's A [rank, in] and B [out, rank] of every module in its span.

    size        elements of the span
    num_values  of them the adapter's own
    factors     (layer, projection) -> (A, B), in PEFT's order; only those that the run trains
    """

    def __init__(self, config: ModelConfig, settings: RunSettings) -> None:
        self._settings = settings
        self.factors: dict[tuple[int, Projection], tuple[Factor, Factor]] = {}
        self._paths: dict[tuple[int, Projection], str] = {}
        end = self.num_values = 0
        for layer in range(config.num_layers):
            for linear, place in config.linears(layer).items():
                if linear.rpartition(".")[2] not in settings.target_modules:
                    continue
                projection = Projection(place)
                in_width, out_width = config.widths(layer)[projection]
                a = Factor(end, settings.rank, in_width)
                b = Factor(_aligned(a.offset + a.size), out_width, settings.rank)
                end = _aligned(b.offset + b.size)
                self.factors[layer, projection] = (a, b)
                self._paths[layer, projection] = f"model.layers.{layer}.{linear}"
                self.num_values += a.size + b.size
        self.size = -(-end // SPAN) * SPAN

    def check_targets(self, config: ModelConfig) -> None:
        """Raise RunRefused for a target that no layer has."""
        layers = range(config.num_layers)
        names = {linear.rpartition(".")[2] for i in layers for linear in config.linears(i)}
        for name in self._settings.target_modules:
            if name not in names:
                raise RunRefused(f"no layer of the base has {name}", param="target_modules")

    def tensors(self, pool: torch.Tensor, first: int = 0) -> dict[str, torch.Tensor]:
        """Return A and B of every module by PEFT's names, as views of a pool's span at `first`."""
        found = {}
        for place, factors in self.factors.items():
            path = self._paths[place]
            for name, factor in zip("AB", factors, strict=True):
                start = first + factor.offset
                view = pool[start : start + factor.size].view(factor.rows, factor.columns)
                found[f"base_model.model.{path}.lora_{name}.weight"] = view
        return found

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raise RunRefused for a tensor that is missing, unknown, misshapen or not finite."""
        wanted = self.tensors(torch.empty(self.size, device="meta"))
        for name in (*wanted, *given):
            if name not in given or name not in wanted:
                kind = "missing from" if name in wanted else "not trained by the run, but in"
                raise RunRefused(f"tensor {name} is {kind} the adapter", param="adapter")
            if given[name].shape != wanted[name].shape:
                shapes = f"{list(given[name].shape)}, not {list(wanted[name].shape)}"
                raise RunRefused(f"tensor {name} has shape {shapes}", param="adapter")
            if not bool(torch.isfinite(given[name]).all()):
                raise RunRefused(f"tensor {name} is not finite", param="adapter")

    def fill(self, pool: torch.Tensor, first: int, given: Mapping[str, torch.Tensor]) -> None:
        """Write an adapter's tensors, which were checked, into its span."""
        for name, view in self.tensors(pool, first).items():
            view.copy_(given[name])

    def placement(self, first: int, layer: int, projection: Projection) -> Placement | None:
        """Return the place of a module in the pools, for the run whose span begins at `first`."""
        factors = self.factors.get((layer, projection))
        if factors is None:
            return None
        a, b = factors
        return Placement(first + a.offset, first + b.offset, a.rows, self._settings.scale)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def fused_of(config: ModelConfig, layer: int) -> list[tuple[Projection, ...]]:
    """Return the projections that lie side by side in each of a layer's matrices."""
    widths = config.widths(layer)
    return [tuple(p for p in group if widths[p][1]) for group in FUSED.values()]


def make_pools(
    capacity: int, device: torch.device, dtype: torch.dtype, memory: torch.Tensor | None = None
) -> Pools:
    """Pools of `capacity` elements, zero; `dtype` is that of the products.

    The optimiser's are in float32 at least; where that is what is computed in, there is no copy.

    memory  [bytes] uint8 that they are cut from, aligned as a new tensor is; None: new memory
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = [wide] * 4 if dtype == wide else [wide] * 4 + [dtype]
    if memory is None and device.type == "cpu":
        pools = [_untouched_zeros(capacity, kind) for kind in kinds]
    elif memory is None:
        pools = [torch.zeros(capacity, dtype=kind, device=device) for kind in kinds]
    else:
        sizes = [capacity * kind.itemsize for kind in kinds]
        cut = torch.split(memory[: sum(sizes)], sizes)
        pools = [part.view(kind).zero_() for part, kind in zip(cut, kinds, strict=True)]
    return Pools(pools[-1] if dtype != wide else pools[0], *pools[:4])


def _untouched_zeros(count: int, kind: torch.dtype) -> torch.Tensor:
    """Zeros on the host that take memory once they are written to: room for runs that may come."""
    if not count:
        return torch.zeros(0, dtype=kind)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * kind.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=kind, count=count)


def clear(pools: Pools, span: Span) -> None:
    """Set a span to zero in every pool."""
    for pool in (pools.values, pools.master, pools.first_moment, pools.second_moment):
        pool[span.elements].zero_()
    pools.gradient[span.elements].zero_()


def to_host(span: torch.Tensor, between: Callable[[], None] | None = None) -> torch.Tensor:
    """Copy a span to the host; from a GPU into pinned memory, which is reused.

    between  called after each of its pieces (`copy_in_pieces`)
    """
    host = torch.empty(span.shape, dtype=span.dtype, pin_memory=span.is_cuda)
    copy_in_pieces(host, span, between)
    return host


def copy_in_pieces(
    target: torch.Tensor, source: torch.Tensor, between: Callable[[], None] | None
) -> None:
    """Copy [N] to [N], and call `between` after each piece: a few milliseconds of a GPU's."""
    for start in range(0, len(source), _PIECE):
        piece = slice(start, start + _PIECE)
        target[piece].copy_(source[piece])
        if between is not None:
            between()
