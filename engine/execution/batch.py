"""Batch and BatchBuilder: a Step as the flat tensors of one forward pass."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.adapters.copies import Arrival
from engine.adapters.store import AdapterStore
from engine.execution.draft_heads import States
from engine.execution.lora_extras import ExtrasTable
from engine.execution.lora_table import Entries, EntryBuffers, EntryCache, LoraScope, join
from engine.execution.prompt_scores import Scores, plan_scores
from engine.execution.uploads import upload
from engine.memory.prefix_cache import AdapterKey
from engine.model.delta_states import StatePages
from engine.sampling.pooling import PooledRows, plan_pooled
from engine.sequence import Row, Step
from kernels import LoraBatch, LoraExtras, LoraTable

# `ModelRunner.adapter_order`
AdapterOrder = Callable[[Iterable[AdapterKey]], Mapping[Hashable, int]]


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
    sample_rows   [N] int64      rows whose next token is wanted, in the order of the step's rows:
                                 `Row.num_wanted` of each that samples
    lora          None when no row has an adapter
    scope         of the step's adapters
    adapter_keys  the virtual adapters of `lora.table`, in its order
    lengths       [S] tokens of each sequence in this step, on the host
    contexts      [S] context_lens on the host
    arrivals      copies of adapters that the pass has to wait for, on the device
    is_drafted    whether sequences bring drafts behind one token each, and `max_new` is theirs
    has_unread    whether `token_ids` has placeholders, ~i for token i of the step before
    scores        the prompt log-probabilities to compute; None: there are none
    pooled        takes the hidden states of rows for their prompts' vectors; None: there are none
    delta         None: the model has no gated delta net
    states        takes what the LM head reads for `sample_rows`; None: nobody wants it
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
    scope: LoraScope = LoraScope.NONE
    arrivals: tuple[Arrival, ...] = ()
    has_unread: bool = False
    is_drafted: bool = False
    scores: Scores | None = None
    pooled: PooledRows | None = None
    delta: StatePages | None = None
    states: States | None = None


class BatchBuilder:
    """Builds batches; keeps the adapters' table while the adapters stay the same.

    buffers         where entries of the table stay on the device
    has_row_tables  whether the model's kernels take `kernels.RowTable`s
    """

    def __init__(
        self,
        *,
        store: AdapterStore,
        page_size: int,
        device: str,
        adapter_order: AdapterOrder,
        buffers: EntryBuffers,
        has_row_tables: bool,
    ) -> None:
        self._store, self._page_size, self._device = store, page_size, device
        self._adapter_order, self._buffers = adapter_order, buffers
        self._has_row_tables = has_row_tables
        self._cache = EntryCache(store.tiles)
        self._table: LoraTable | None = None
        self._table_keys: tuple[AdapterKey, ...] = ()
        self._table_entries: list[Entries] = []
        self._max_tiles = 0
        self._has_experts: tuple[bool, ...] = ()
        self._scope = LoraScope.NONE
        self._extras: ExtrasTable | None = None

    def build(self, step: Step) -> Batch:
        """Make the tensors of `step`; sort the step's rows into the order that runs fastest."""
        rows = self._arrange(step)
        lengths = np.array([row.num_tokens for row in rows], np.int32)
        starts = np.array([row.sequence.num_computed for row in rows], np.int32)
        query_start = np.cumsum(np.append(np.int32(0), lengths), dtype=np.int32)
        page_tables = _page_tables(rows)
        token_row = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(query_start[-1]) - (query_start[:-1] - starts)[token_row]
        pages = page_tables[token_row, positions // self._page_size].astype(np.int64)
        sample_rows = _sample_rows(step, query_start)
        token_ids = _token_ids(rows)
        keys, seg_indptr, seg_adapter = _segments(rows, query_start)
        on_device = upload(
            [
                token_ids,
                positions,
                pages * self._page_size + positions % self._page_size,
                query_start,
                starts + lengths,
                page_tables,
                sample_rows,
                seg_indptr,
                seg_adapter,
            ],
            self._device,
        )
        lora = None
        extras_of = functools.partial(self._extras_of, keys, seg_indptr, seg_adapter)
        if keys:
            lora = LoraBatch(
                table=self._table_of(keys),
                seg_indptr=on_device[7],
                seg_adapter=on_device[8],
                max_tiles=self._max_tiles,
                extras=extras_of(sample_rows),
                has_experts=self._has_experts,
            )
        return Batch(
            token_ids=on_device[0],
            positions=on_device[1],
            slots=on_device[2],
            query_start=on_device[3],
            context_lens=on_device[4],
            max_new=int(lengths.max()),
            page_tables=on_device[5],
            sample_rows=on_device[6],
            lora=lora,
            adapter_keys=keys,
            lengths=lengths,
            contexts=starts + lengths,
            scope=LoraScope.NONE if lora is None else self._scope,
            arrivals=self._store.arrivals(digest for key in keys for digest, _ in key),
            has_unread=bool((token_ids < 0).any()),
            is_drafted=step.has_drafts and all(row.num_known == 1 for row in rows),
            scores=plan_scores(rows, query_start, self._device, extras_of),
            pooled=plan_pooled(rows, query_start, self._tensor, self._store.tiles),
            delta=_state_pages(rows, self._device),
            states=States() if step.keeps_states else None,
        )

    def _extras_of(
        self,
        keys: tuple[AdapterKey, ...],
        seg_indptr: npt.NDArray[np.int32],
        seg_adapter: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
    ) -> LoraExtras | None:
        """Return the extras of the table's adapters; the logits of `rows` are wanted."""
        if not keys or self._extras is None:
            return None
        return self._extras.of_step(seg_indptr.tolist(), seg_adapter.tolist(), rows)

    def _arrange(self, step: Step) -> list[Row]:
        """Sort the rows and return them: those of one adapter are adjacent, the base's are last."""
        order = self._adapter_order(row.sequence.adapter_key for row in step.rows)
        last = len(order)
        step.rows.sort(
            key=lambda row: (
                not row.sequence.adapter_key,
                order.get(row.sequence.adapter_key, last),
            )
        )
        return step.rows

    def _tensor(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload([values], self._device)[0]

    def _table_of(self, keys: tuple[AdapterKey, ...]) -> LoraTable:
        """Return the table of these virtual adapters; rebuild it only if one has changed."""
        entries = self._cache.get(keys)
        if (
            self._table is None
            or keys != self._table_keys
            or not all(map(operator.is_, entries, self._table_entries))
        ):
            self._table = self._build_table(keys, entries)
            self._table_keys, self._table_entries = keys, entries
        return self._table

    def _build_table(self, keys: tuple[AdapterKey, ...], entries: list[Entries]) -> LoraTable:
        self._max_tiles = max(own.num_tiles for own in entries)
        self._has_experts = tuple(own.has_experts for own in entries)
        self._scope = max(own.scope for own in entries)
        self._extras = None
        if any(own.has_extras for own in entries):
            tiles, has_tables = [own.tiles for own in entries], self._has_row_tables
            self._extras = ExtrasTable(keys, tiles, self._tensor, has_tables=has_tables)
        starts = self._buffers.starts(keys, entries)
        if starts is None:
            return join(entries, self._device)
        num_tiles = np.array([own.num_tiles for own in entries], np.int32)
        return self._buffers.table(*upload([starts, num_tiles], self._device))


def _segments(
    rows: list[Row], query_start: npt.NDArray[np.int32]
) -> tuple[tuple[AdapterKey, ...], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the virtual adapters of a step, and `seg_indptr` and `seg_adapter` as in LoraBatch."""
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
    return tuple(keys), np.array(seg_indptr, np.int32), np.array(seg_adapter, np.int32)


def _page_tables(rows: list[Row]) -> npt.NDArray[np.int32]:
    tables = [row.sequence.page_table.tobytes() for row in rows]
    width = max(map(len, tables))
    # By bytes: numpy takes 1.5 us to copy an `array` into a row.
    flat = bytearray().join(table.ljust(width, b"\0") for table in tables)
    return np.frombuffer(flat, np.int32).reshape(len(tables), -1)


def _state_pages(rows: list[Row], device: str) -> StatePages | None:
    sequences = [row.sequence for row in rows]
    if not sequences[0].state:
        return None
    read = [sequence.state_before or sequence.state for sequence in sequences]
    write = [sequence.state for sequence in sequences]
    is_new = np.array([not sequence.state_before for sequence in sequences])
    return StatePages(*upload([_rows_of(read), _rows_of(write), is_new], device))


def _rows_of(tables: list[array[int]]) -> npt.NDArray[np.int64]:
    flat = bytearray().join(table.tobytes() for table in tables)
    return np.frombuffer(flat, np.int64).reshape(len(tables), -1)


def _token_ids(rows: list[Row]) -> npt.NDArray[np.int64]:
    token_ids: list[int] = []
    for row in rows:
        first, own = row.sequence.num_computed, row.sequence.token_ids
        if first + 1 == len(own):  # a decode: its last token is all that is known
            token_ids.append(own[first])
        else:
            token_ids += own[first : first + row.num_tokens]
        if row.drafts:
            token_ids += row.drafts
    return np.array(token_ids, np.int64)


def _sample_rows(step: Step, query_start: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    if step.has_drafts:
        return _drafted_rows(step.rows, query_start)
    samples = np.array([row.samples for row in step.rows], np.bool_)
    return (query_start[1:][samples] - 1).astype(np.int64)


def _drafted_rows(rows: list[Row], query_start: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return `Batch.sample_rows` of a step with drafts: a token is wanted after each draft, too.

    None is wanted where the next draft is certain.
    """
    wanted: list[int] = []
    for row, end in zip(rows, query_start[1:].tolist(), strict=True):
        if row.drafts:  # then it samples
            first = end - 1 - len(row.drafts)
            wanted += [first + i for i, certain in enumerate(row.certain) if not certain]
            wanted.append(end - 1)
        elif row.samples:
            wanted.append(end - 1)
    return np.array(wanted, np.int64)
