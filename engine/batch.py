"""A Step as the flat tensors of one forward pass."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.adapter_copies import Arrival
from engine.adapter_extras import ExtrasTable
from engine.adapter_tiles import TileMap
from engine.adapters import AdapterStore
from engine.prefix_cache import AdapterKey
from engine.sequence import Row, Step
from kernels import NUM_PROJECTIONS, LoraBatch, LoraTable, Projection

T = TypeVar("T", bound=np.generic)

# `ModelRunner.adapter_order`
AdapterOrder = Callable[[Iterable[AdapterKey]], Mapping[Hashable, int]]


class Reach(enum.IntEnum):
    """What of a layer a step's adapters change; what none changes need not ask for adapters."""

    NONE = 0
    ATTENTION = 1
    ALL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The inputs of one forward pass: T tokens of S sequences, on the engine's device.

    token_ids     [T] int64
    positions     [T] int64
    slots         [T] int64      page * page_size + offset, where each token's KV goes
    query_start   [S + 1] int32  the rows of each sequence
    context_lens  [S] int32      tokens of each sequence, this step's included
    max_new       tokens of the sequence that brings most; 1: nothing but decodes
    page_tables   [S, max_pages] int32, zero past a sequence's pages
    sample_rows   [N] int64      rows whose next token is wanted, in the order of the step's rows
    lora          None when no row has an adapter
    reach         of the step's adapters
    adapter_keys  the virtual adapters of `lora.table`, in its order
    lengths       [S] tokens of each sequence in this step, on the host
    contexts      [S] context_lens on the host
    arrivals      copies of adapters that the pass has to wait for, on the device
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_new: int
    page_tables: torch.Tensor
    sample_rows: torch.Tensor
    lora: LoraBatch | None
    adapter_keys: tuple[AdapterKey, ...]
    lengths: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    reach: Reach = Reach.NONE
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class _Entries:
    """A virtual adapter's entries of the table, and the tiles that they were made of."""

    tiles: list[TileMap]
    has_extras: bool
    num_tiles: int
    a_offset: npt.NDArray[np.int64]
    b_offset: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    reach: Reach

    @classmethod
    def of(cls, key: AdapterKey, tiles: list[TileMap]) -> _Entries:
        scale = [part.scale * np.float32(w) for part, (_, w) in zip(tiles, key, strict=True)]
        return cls(
            tiles=tiles,
            has_extras=any(part.has_extras for part in tiles),
            num_tiles=sum(part.num_tiles for part in tiles),
            a_offset=_side_by_side([part.a_offset for part in tiles]),
            b_offset=_side_by_side([part.b_offset for part in tiles]),
            rows=_side_by_side([part.rows for part in tiles]),
            scale=_side_by_side(scale),
            reach=max(_reach(part) for part in tiles),
        )


class BatchBuilder:
    """Builds batches; keeps the adapters' table from one step to the next while it stays true."""

    def __init__(
        self, *, store: AdapterStore, page_size: int, device: str, adapter_order: AdapterOrder
    ) -> None:
        self._store, self._page_size, self._device = store, page_size, device
        self._adapter_order = adapter_order
        self._table: LoraTable | None = None
        self._table_keys: tuple[AdapterKey, ...] = ()
        self._table_tiles: list[TileMap] = []
        self._entries: dict[AdapterKey, _Entries] = {}
        self._max_tiles = 0
        self._reach = Reach.NONE
        self._extras: ExtrasTable | None = None

    def build(self, step: Step) -> Batch:
        """The tensors of `step`; brings the step's rows into the order that runs fastest."""
        self._arrange(step)
        rows = step.rows
        lengths = np.fromiter((row.num_tokens for row in rows), np.int32, len(rows))
        starts = np.fromiter((row.sequence.num_computed for row in rows), np.int32, len(rows))
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=query_start[1:])
        num_pages = [len(row.sequence.page_table) for row in rows]
        page_tables = np.zeros((len(rows), max(num_pages)), np.int32)
        for i, row in enumerate(rows):
            page_tables[i, : num_pages[i]] = row.sequence.page_table
        token_row = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[token_row]
        pages = page_tables[token_row, positions // self._page_size].astype(np.int64)
        samples = np.fromiter((row.samples for row in rows), np.bool_, len(rows))
        sample_rows = (query_start[1:][samples] - 1).astype(np.int64)
        lora, keys = self._lora(rows, query_start, sample_rows)
        return Batch(
            token_ids=self._tensor(_token_ids(rows)),
            positions=self._tensor(positions),
            slots=self._tensor(pages * self._page_size + positions % self._page_size),
            query_start=self._tensor(query_start),
            context_lens=self._tensor(starts + lengths),
            max_new=int(lengths.max()),
            page_tables=self._tensor(page_tables),
            sample_rows=self._tensor(sample_rows),
            lora=lora,
            adapter_keys=keys,
            lengths=lengths,
            contexts=starts + lengths,
            reach=Reach.NONE if lora is None else self._reach,
            arrivals=self._store.arrivals(digest for key in keys for digest, _ in key),
        )

    def _arrange(self, step: Step) -> None:
        """Rows of one adapter stay adjacent; those of the base come last."""
        order = self._adapter_order(row.sequence.adapter_key for row in step.rows)
        last = len(order)
        step.rows.sort(
            key=lambda row: (
                not row.sequence.adapter_key,
                order.get(row.sequence.adapter_key, last),
            )
        )

    def _tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)

    def _lora(
        self,
        rows: list[Row],
        query_start: npt.NDArray[np.int32],
        sample_rows: npt.NDArray[np.int64],
    ) -> tuple[LoraBatch | None, tuple[AdapterKey, ...]]:
        keys: list[AdapterKey] = []
        seg_indptr, seg_adapter = [0], []
        previous: AdapterKey | None = None
        for row, end in zip(rows, query_start[1:].tolist(), strict=True):
            key = row.sequence.adapter_key
            if key == previous:
                seg_indptr[-1] = end
                continue
            previous = key
            seg_indptr.append(end)
            seg_adapter.append(len(keys) if key else -1)
            if key:
                keys.append(key)
        if not keys:
            return None, ()
        table = self._table_of(tuple(keys))
        extras = None
        if self._extras is not None:
            extras = self._extras.of_step(seg_indptr, seg_adapter, sample_rows)
        batch = LoraBatch(
            table=table,
            seg_indptr=self._tensor(np.array(seg_indptr, np.int32)),
            seg_adapter=self._tensor(np.array(seg_adapter, np.int32)),
            max_tiles=self._max_tiles,
            extras=extras,
        )
        return batch, tuple(keys)

    def _table_of(self, keys: tuple[AdapterKey, ...]) -> LoraTable:
        """The table of these virtual adapters, joined anew only when one of them is another."""
        tiles = [self._store.tiles(digest) for key in keys for digest, _ in key]
        if (
            self._table is None
            or keys != self._table_keys
            or not all(map(operator.is_, tiles, self._table_tiles))
        ):
            self._table = self._build_table(keys)
            self._table_keys, self._table_tiles = keys, tiles
        return self._table

    def _build_table(self, keys: tuple[AdapterKey, ...]) -> LoraTable:
        known, self._entries = self._entries, {}
        for key in keys:
            tiles = [self._store.tiles(digest) for digest, _ in key]
            own = known.get(key)
            if own is None or not all(map(operator.is_, tiles, own.tiles)):
                own = _Entries.of(key, tiles)
            self._entries[key] = own
        entries = [self._entries[key] for key in keys]
        self._max_tiles = max(own.num_tiles for own in entries)
        self._reach = max(own.reach for own in entries)
        has_extras = any(own.has_extras for own in entries)
        self._extras = (
            ExtrasTable(keys, [own.tiles for own in entries], self._tensor) if has_extras else None
        )
        return self._join(entries)

    def _join(self, entries: list[_Entries]) -> LoraTable:
        ends = np.cumsum([0, *(own.rows.size for own in entries[:-1])])
        return LoraTable(
            entry_start=self._tensor(ends.astype(np.int64)),
            num_tiles=self._tensor(np.array([own.num_tiles for own in entries], np.int32)),
            a_offset=self._tensor(np.concatenate([own.a_offset for own in entries])),
            b_offset=self._tensor(np.concatenate([own.b_offset for own in entries])),
            rows=self._tensor(np.concatenate([own.rows for own in entries])),
            scale=self._tensor(np.concatenate([own.scale for own in entries])),
        )


def _reach(tiles: TileMap) -> Reach:
    """Where an adapter has tiles; its entries are [L * 7, tiles] in the projections' order."""
    is_mlp = np.arange(len(tiles.a_offset)) % NUM_PROJECTIONS >= Projection.GATE
    reaches_mlp = tiles.has_extras or (tiles.a_offset[is_mlp] >= 0).any()
    return Reach.ALL if reaches_mlp else Reach.ATTENTION


def _side_by_side(parts: list[npt.NDArray[T]]) -> npt.NDArray[T]:
    """The entries of a blend's parts `[L * 7, tiles]`, one after another within each row."""
    return (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).ravel()


def _token_ids(rows: list[Row]) -> npt.NDArray[np.int64]:
    token_ids: list[int] = []
    for row in rows:
        first = row.sequence.num_computed
        token_ids += row.sequence.token_ids[first : first + row.num_tokens]
    return np.array(token_ids, np.int64)
