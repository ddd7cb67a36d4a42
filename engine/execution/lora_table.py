"""The adapters' table, kept on the device from one step to the next.

An adapter has an entry for every tile of every layer and projection, 224 for rank 8 and 3,584 for
rank 128 in a model of 32 layers. The entries are copied to buffers on the device when a step first
reads the adapter. Later steps only say where each adapter's entries begin.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.adapters.tiles import TileMap
from engine.execution.uploads import upload
from engine.memory.prefix_cache import AdapterKey
from kernels import NUM_PROJECTIONS, LoraTable, Projection

T = TypeVar("T", bound=np.generic)

# Largest number of entries that are kept for adapters that the newest step does not read, 24 bytes
# each.
_MAX_KEPT = 1 << 20

# digest -> a resident adapter's tiles
TilesOf = Callable[[str], TileMap]


class LoraScope(enum.IntEnum):
    """Which parts of a layer a step's adapters change; the other parts run without adapters."""

    NONE = 0
    ATTENTION = 1
    ALL = 2
    ADJUSTED = 3  # the base's own products too: DoRA's gains, biases, tokens' new rows


@dataclass(frozen=True, slots=True)
class Entries:
    """A virtual adapter's entries of the table, and the tiles that they describe."""

    tiles: list[TileMap]
    has_extras: bool
    has_experts: bool
    num_tiles: int
    a_offset: npt.NDArray[np.int64]
    b_offset: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    scope: LoraScope

    @classmethod
    def of(cls, key: AdapterKey, tiles: list[TileMap]) -> Entries:
        scale = [part.scale * np.float32(w) for part, (_, w) in zip(tiles, key, strict=True)]
        return cls(
            tiles=tiles,
            has_extras=any(part.has_extras for part in tiles),
            has_experts=any(part.num_experts for part in tiles),
            num_tiles=sum(part.num_tiles for part in tiles),
            a_offset=_side_by_side([_in_numbers(part.a_offset, part) for part in tiles], -1),
            b_offset=_side_by_side([_in_numbers(part.b_offset, part) for part in tiles], -1),
            rows=_side_by_side([part.rows for part in tiles]),
            scale=_side_by_side(scale),
            scope=max(_scope(part) for part in tiles),
        )


class EntryCache:
    """Keeps the entries of virtual adapters that steps have read, up to a limit."""

    def __init__(self, tiles_of: TilesOf) -> None:
        self._tiles_of = tiles_of
        self._entries: dict[AdapterKey, Entries] = {}
        self._size = 0

    def get(self, keys: Sequence[AdapterKey]) -> list[Entries]:
        """Return the entries of each: the same objects as before while the tiles are the same."""
        if self._size > _MAX_KEPT:
            self._entries = {key: self._entries[key] for key in keys if key in self._entries}
            self._size = _size(self._entries.values())
        found = []
        for key in keys:
            tiles = [self._tiles_of(digest) for digest, _ in key]
            own = self._entries.get(key)
            if own is None or not all(map(operator.is_, tiles, own.tiles)):
                own = self._entries[key] = Entries.of(key, tiles)
                self._size += own.rows.size
            found.append(own)
        return found


class EntryBuffers:
    """The entries of many virtual adapters on the device, one after the other.

    max_entries  their number; when it is reached, all entries are copied again
    """

    def __init__(self, max_entries: int, device: torch.device) -> None:
        self._device = device

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(max_entries, dtype=dtype, device=device)

        self.a_offset, self.b_offset = empty(torch.int64), empty(torch.int64)
        self.rows, self.scale = empty(torch.int32), empty(torch.float32)
        self._starts: dict[AdapterKey, tuple[int, Entries]] = {}
        self._end = 0

    def starts(
        self, keys: Sequence[AdapterKey], entries: Sequence[Entries]
    ) -> npt.NDArray[np.int64] | None:
        """Copy missing entries; return where the entries of each begin, None if they lack room.

        Steps in flight are not disturbed: later launches see the copies.
        """
        missing = self._missing(keys, entries)
        if self._end + _size(missing.values()) > len(self.a_offset):
            self.clear()
            missing = self._missing(keys, entries)
            if _size(missing.values()) > len(self.a_offset):
                return None
        if missing:
            self._put(missing)
        return np.array([self._starts[key][0] for key in keys], np.int64)

    def table(self, starts: torch.Tensor, num_tiles: torch.Tensor) -> LoraTable:
        """Return the table of adapters whose entries begin at `starts`."""
        return LoraTable(
            entry_start=starts,
            num_tiles=num_tiles,
            a_offset=self.a_offset,
            b_offset=self.b_offset,
            rows=self.rows,
            scale=self.scale,
        )

    def clear(self) -> None:
        """Forget all entries."""
        self._starts.clear()
        self._end = 0

    def _missing(
        self, keys: Sequence[AdapterKey], entries: Sequence[Entries]
    ) -> dict[AdapterKey, Entries]:
        return {
            key: own
            for key, own in zip(keys, entries, strict=True)
            if key not in self._starts or self._starts[key][1] is not own
        }

    def _put(self, missing: dict[AdapterKey, Entries]) -> None:
        first = self._end
        for key, own in missing.items():
            self._starts[key] = self._end, own
            self._end += own.rows.size
        for name in ("a_offset", "b_offset", "rows", "scale"):
            joined = np.concatenate([getattr(own, name) for own in missing.values()])
            getattr(self, name)[first : self._end].copy_(upload([joined], self._device)[0])


def join(entries: Sequence[Entries], device: str) -> LoraTable:
    """Make a table of these entries alone, in their order."""
    ends = np.cumsum([0, *(own.rows.size for own in entries[:-1])])
    fields: dict[str, npt.NDArray[Any]] = {
        "entry_start": ends.astype(np.int64),
        "num_tiles": np.array([own.num_tiles for own in entries], np.int32),
        "a_offset": np.concatenate([own.a_offset for own in entries]),
        "b_offset": np.concatenate([own.b_offset for own in entries]),
        "rows": np.concatenate([own.rows for own in entries]),
        "scale": np.concatenate([own.scale for own in entries]),
    }
    return LoraTable(**dict(zip(fields, upload(list(fields.values()), device), strict=True)))


def _size(entries: Iterable[Entries]) -> int:
    return sum(own.rows.size for own in entries)


def _scope(tiles: TileMap) -> LoraScope:
    """Return where an adapter has tiles; its entries are [L * 8, tiles], by projection."""
    if tiles.adjusts or tiles.replaces:
        return LoraScope.ADJUSTED
    places = np.arange(len(tiles.a_offset)) % NUM_PROJECTIONS
    is_mlp = (places >= Projection.GATE) & (places <= Projection.DOWN)
    changes_mlp = tiles.has_extras or (tiles.a_offset[is_mlp] >= 0).any()
    return LoraScope.ALL if changes_mlp else LoraScope.ATTENTION


def _in_numbers(offsets: npt.NDArray[np.int64], tiles: TileMap) -> npt.NDArray[np.int64]:
    return np.where(offsets < 0, offsets, offsets * tiles.per_element)


def _side_by_side(parts: list[npt.NDArray[T]], none: int = 0) -> npt.NDArray[T]:
    """Return the entries of a blend's parts `[L * 8, tiles]`, one after another within each row.

    none  an entry of those that change no experts, where others do
    """
    most = max(map(len, parts))
    parts = [
        np.pad(part, ((0, most - len(part)), (0, 0)), constant_values=none)
        if len(part) < most
        else part
        for part in parts
    ]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).ravel()
