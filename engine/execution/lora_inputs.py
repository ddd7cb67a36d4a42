"""LoraInputs: the adapters of a step in fixed buffers, which recorded graphs read."""

from __future__ import annotations

from dataclasses import fields

import torch

from engine.execution.lora_table import EntryBuffers
from kernels import AdjustTable, LoraBatch, LoraExtras, LoraTable, RowTable

# Largest number of blocks of 16 rank rows of one request's adapters in a graph: together rank 512.
MAX_BLOCKS = 32
MAX_ENTRIES = 1 << 21
# Largest number of places where adapters of one step have a gain or a shift; an adapter with 32
# layers has 224.
MAX_ADJUSTS = 1 << 17
# Largest number of tokens for which adapters of one step have rows of their own, of the embedding
# or the last matrix.
MAX_NEW_ROWS = 1 << 16


class LoraInputs:
    """The table and the segments. The graphs that share them never run at the same time.

    buffers      of the table's entries, which stay there from one step to the next
    max_rows     segments, and virtual adapters, of one step
    max_tokens   tokens of one step
    max_entries  tile entries of all adapters in one step
    max_blocks   blocks of 16 rank rows that one request's adapters have
    """

    def __init__(
        self,
        device: torch.device,
        *,
        max_rows: int,
        max_tokens: int,
        max_entries: int,
        max_blocks: int,
    ) -> None:
        self.max_rows, self.max_entries, self.max_blocks = max_rows, max_entries, max_blocks

        def ints(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.seg_indptr = ints(max_rows + 1)
        self.seg_adapter = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.buffers = EntryBuffers(max_entries, device)
        self.table = self.buffers.table(ints(max_rows, torch.int64), ints(max_rows))
        self._row_adapter = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._adjust = AdjustTable(
            part_start=ints(max_rows, torch.int64),
            num_parts=ints(max_rows),
            gain_offset=ints(MAX_ADJUSTS, torch.int64),
            shift_offset=ints(MAX_ADJUSTS, torch.int64),
            weight=torch.zeros(MAX_ADJUSTS, dtype=torch.float32, device=device),
        )
        self._rows = tuple(
            RowTable(
                first=ints(max_rows),
                count=ints(max_rows),
                token_id=ints(MAX_NEW_ROWS),
                part_start=ints(MAX_NEW_ROWS),
                num_parts=ints(MAX_NEW_ROWS),
                offset=ints(MAX_NEW_ROWS, torch.int64),
                weight=torch.zeros(MAX_NEW_ROWS, dtype=torch.float32, device=device),
            )
            for _ in range(2)
        )  # for the embedding, for the last matrix
        self._loaded: LoraTable | None = None
        # The contents of the buffers: the vectors, and the two tables of rows.
        self._extended: list[AdjustTable | RowTable | None] = [None, None, None]

    def fits(self, lora: LoraBatch | None) -> bool:
        return lora is None or (
            self._fits_extras(lora.extras)
            and lora.max_tiles <= 2 * self.max_blocks
            and lora.table.a_offset.shape[0] <= self.max_entries
            and lora.table.entry_start.shape[0] <= self.max_rows
            and lora.seg_adapter.shape[0] <= self.max_rows
        )

    def load(self, lora: LoraBatch, size: int) -> None:
        """Set the adapters of a step whose graph has room for `size` segments."""
        fill_segments(self.seg_indptr, lora.seg_indptr, size)
        segments = lora.seg_adapter.shape[0]
        self.seg_adapter[:segments].copy_(lora.seg_adapter)
        self.seg_adapter[segments:size].fill_(-1)
        if lora.extras is not None:
            self._load_extras(lora.extras)
        if lora.table is self._loaded:
            return
        names = ["entry_start", "num_tiles"]
        if lora.table.rows is not self.table.rows:  # not a table of the buffers
            self.buffers.clear()
            names += ["a_offset", "b_offset", "rows", "scale"]
        for name in names:
            source = getattr(lora.table, name)
            getattr(self.table, name)[: source.shape[0]].copy_(source)
        self._loaded = lora.table

    def _fits_extras(self, extras: LoraExtras | None) -> bool:
        """Return whether tables hold the extras; wider ones run without a graph."""
        if extras is None:
            return True
        rows = (table for table in (extras.embedding_rows, extras.head_rows) if table is not None)
        return (
            (extras.adjust is None or extras.adjust.weight.shape[0] <= MAX_ADJUSTS)
            and all(table.weight.shape[0] <= MAX_NEW_ROWS for table in rows)
            and not any(segment.is_wide for segment in extras.segments)
        )

    def _load_extras(self, extras: LoraExtras) -> None:
        num_tokens = extras.row_adapter.shape[0]
        self._row_adapter[:num_tokens].copy_(extras.row_adapter)
        self._row_adapter[num_tokens:].fill_(-1)
        self._extend(0, extras.adjust, self._adjust, self._adjust.num_parts)
        for i, source in enumerate((extras.embedding_rows, extras.head_rows)):
            self._extend(i + 1, source, self._rows[i], self._rows[i].count)

    def _extend(
        self,
        i: int,
        source: AdjustTable | RowTable | None,
        buffers: AdjustTable | RowTable,
        counts: torch.Tensor,
    ) -> None:
        """Copy a step's table to its buffers, or set their counts to none."""
        if source is self._extended[i]:
            return
        if source is None:
            counts.zero_()
        else:
            for field in fields(source):
                values = getattr(source, field.name)
                getattr(buffers, field.name)[: values.shape[0]].copy_(values)
        self._extended[i] = source

    def extras(self, num_tokens: int) -> LoraExtras:
        """Return the gains, shifts and new rows of a step with this number of tokens."""
        return LoraExtras(
            segments=(),
            row_adapter=self._row_adapter[:num_tokens],
            adjust=self._adjust,
            embedding_rows=self._rows[0],
            head_rows=self._rows[1],
        )

    def batch(self, size: int, seg_indptr: torch.Tensor | None = None) -> LoraBatch:
        """Return the first `size` segments; with other bounds when given."""
        bounds = self.seg_indptr if seg_indptr is None else seg_indptr
        return LoraBatch(
            table=self.table,
            seg_indptr=bounds[: size + 1],
            seg_adapter=self.seg_adapter[:size],
            max_tiles=2 * self.max_blocks,
        )

    def clear(self) -> None:
        """Make every row one without an adapter."""
        self.seg_indptr.zero_()
        self.seg_adapter.fill_(-1)
        self._row_adapter.fill_(-1)


def fill_segments(buffer: torch.Tensor, bounds: torch.Tensor, size: int) -> None:
    """Copy segment bounds to the front of `buffer`; segments up to `size` become empty."""
    known = bounds.shape[0]
    buffer[:known].copy_(bounds)
    buffer[known : size + 1].copy_(bounds[-1:].expand(max(size + 1 - known, 0)))
