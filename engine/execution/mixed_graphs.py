"""MixedGraphs: steps with prompts as CUDA graphs, one per token bucket and LoraScope.

Launched one by one, the 300 to 600 kernels of such a step take 7 to 22 ms of host time, whatever
the step has; the products of 300 tokens take 7. So prompts of up to `max_tokens` run as one graph,
together with all decodes.

To the prefill kernel every `BLOCK` new tokens of a prompt are a sequence of their own, so that its
grid follows from the number of tokens alone. The decode kernel computes the decodes and skips the
prompts. Rows past the step's tokens compute what nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.batch import Batch
from engine.execution.decode_graphs import GRAPH_BYTES, record
from engine.execution.gpu_batch import ChunkBlocks, GpuBatch
from engine.execution.gpu_decoder import GpuModel
from engine.execution.lora_inputs import LoraInputs, fill_segments
from engine.execution.lora_table import LoraScope
from engine.execution.uploads import upload
from engine.model.gpu_delta import StateTables
from kernels.attention_decode import DecodeWorkspace
from kernels.lora.plan import RANK_BLOCK, LoraPlan, empty_plan, fill_plan
from kernels.sampling import greedy_triton

BUCKETS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BLOCK = 32
MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers of tokens, sequences and blocks of prompts that a bucket holds."""

    tokens: int
    rows: int

    @property
    def blocks(self) -> int:
        """The most blocks: a prompt has two tokens or more; decodes before it fill an empty one."""
        return self.tokens // BLOCK + min(2 * MAX_PROMPTS, 2 * self.tokens // 3) + 1


class MixedGraphs:
    """Fixed input buffers and the graphs that read them; a step beyond them has no graph."""

    def __init__(
        self,
        model: GpuModel,
        *,
        max_tokens: int,
        max_rows: int,
        max_pages: int,
        lora: LoraInputs,
    ) -> None:
        self._model, self._lora, self._max_rows = model, lora, max_rows
        device, most = model.device, min(max_tokens, BUCKETS[-1])
        self._sizes = (*(size for size in BUCKETS if size < most), most)

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        largest = self._shape(most)
        self._token_ids = ints(most, dtype=torch.int64)
        self._positions = ints(most, dtype=torch.int64)
        self._slots = ints(most, dtype=torch.int64)
        self._query_start = ints(max_rows + 1)
        self._context_lens = ints(max_rows)
        self._page_tables = ints(max_rows, max_pages)
        self._block_start = ints(largest.blocks + 1)
        self._block_context = ints(largest.blocks)
        self._block_row = ints(largest.blocks)
        self._sample_rows = ints(max_rows, dtype=torch.int64)
        self._sample_indptr = ints(max_rows + 1)
        vocab_size = model.config.vocab_size
        self._states = None if model.delta is None else StateTables(model.delta, max_rows)
        self._logits = torch.empty(max_rows, vocab_size, dtype=model.arena.dtype, device=device)
        self.token_ids = ints(max_rows, dtype=torch.int64)
        self.marked = ints(max_rows, dtype=torch.int64)
        self._workspaces: dict[int, DecodeWorkspace] = {}
        self._plans: dict[int, tuple[LoraPlan, LoraPlan]] = {}
        self._graphs: dict[tuple[int, LoraScope], torch.cuda.CUDAGraph] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets there are, the smallest first."""
        return self._sizes

    def fits(self, batch: Batch) -> bool:
        """Return whether such a step has a graph."""
        return (
            batch.token_ids.shape[0] <= self._sizes[-1]
            and max(len(batch.lengths), len(batch.sample_rows)) <= self._max_rows
            and batch.page_tables.shape[1] <= self._page_tables.shape[1]
            and int((batch.lengths > 1).sum()) <= MAX_PROMPTS
            and self._lora.fits(batch.lora)
        )

    def capture(self, size: int, scope: LoraScope, pool: Any) -> None:
        """Record the graph of a bucket, unless it is there or the device has none."""
        if (size, scope) in self._graphs or self._model.device.type != "cuda":
            return
        self._clear()
        run_args = (self._batch(size, scope), self._shape(size))
        stream = self._model.recording_stream
        assert stream is not None
        graph, _ = record(lambda: self._run(*run_args), pool, stream)
        self._graphs[size, scope] = graph

    def bytes_of_others(self) -> int:
        """Return the bytes that all graphs take together, beyond those of the largest bucket."""
        return len(LoraScope) * (len(self._sizes) - 1) * GRAPH_BYTES

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits [N, V] of the sampling rows, valid until the next run.

        The caller has asked `fits`. `token_ids` and `marked` are as in `DecodeGraphs`.
        """
        size, scope = self._size_of(batch), batch.scope
        self.capture(size, scope, None)
        self._load(batch, self._shape(size))
        if self._model.device.type == "cuda":
            self._graphs[size, scope].replay()
        else:  # no graphs there: the same pass, launch by launch
            self._run(self._batch(size, scope), self._shape(size))
        return self._logits[: batch.sample_rows.shape[0]]

    def _size_of(self, batch: Batch) -> int:
        num_tokens = batch.token_ids.shape[0]
        return next(size for size in self._sizes if num_tokens <= size)

    def _shape(self, size: int) -> Shape:
        return Shape(tokens=size, rows=min(size, self._max_rows))

    def _load(self, batch: Batch, shape: Shape) -> None:
        num_tokens, num_rows = batch.token_ids.shape[0], len(batch.lengths)
        self._token_ids[:num_tokens].copy_(batch.token_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[:num_tokens].copy_(batch.slots)
        self._slots[num_tokens : shape.tokens].fill_(-1)
        fill_segments(self._query_start, batch.query_start, shape.rows)
        self._context_lens[:num_rows].copy_(batch.context_lens)
        self._page_tables[:num_rows, : batch.page_tables.shape[1]].copy_(batch.page_tables)
        blocks = cut_blocks(batch.lengths, batch.contexts)
        start, context, row = upload(blocks, self._model.device)
        fill_segments(self._block_start, start, shape.blocks)
        self._block_context[: len(context)].copy_(context)
        self._block_row[: len(row)].copy_(row)
        num_samples = batch.sample_rows.shape[0]
        self._sample_rows[:num_samples].copy_(batch.sample_rows)
        self._sample_rows[num_samples : shape.rows].zero_()
        if self._states is not None and batch.delta is not None:
            self._states.load(batch.delta, shape.rows)
        if batch.lora is not None:
            self._lora.load(batch.lora, shape.rows)
            bounds = batch.lora.seg_indptr.long()
            before = torch.searchsorted(batch.sample_rows, bounds, out_int32=True)
            fill_segments(self._sample_indptr, before, shape.rows)

    def _batch(self, size: int, scope: LoraScope) -> GpuBatch:
        """Return a view of the buffers' beginnings."""
        shape = self._shape(size)
        model, rows = self._model, shape.rows
        if rows not in self._workspaces:
            self._workspaces[rows] = DecodeWorkspace(
                rows, model.config.num_heads, model.layout, model.device
            )
        if scope and size not in self._plans:
            # 32 tokens a chunk pay where prompts are long, not where they meet decodes.
            block_t, most = 2 * RANK_BLOCK if size > 512 else RANK_BLOCK, self._lora.max_blocks
            self._plans[size] = (
                empty_plan(size, rows, most, block_t, model.device),
                empty_plan(rows, rows, most, RANK_BLOCK, model.device),
            )
        plan, sample_plan = self._plans[size] if scope else (None, None)
        return GpuBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_start=self._query_start[: rows + 1],
            context_lens=self._context_lens[:rows],
            page_tables=self._page_tables[:rows],
            max_new=size,
            workspace=self._workspaces[rows],
            sample_rows=self._sample_rows[:rows],
            table=self._lora.table if scope else None,
            # Where the products fill the card, what runs beside them only takes their room: 18.1
            # instead of 18.3 ms for 512 tokens of 94 adapters on an H200.
            is_in_line=size > 256,
            is_mlp_plain=scope is LoraScope.ATTENTION,
            plan=plan,
            sample_plan=sample_plan,
            extras=self._lora.extras(size) if scope is LoraScope.ADJUSTED else None,
        )

    def _run(self, batch: GpuBatch, shape: Shape) -> torch.Tensor:
        if batch.plan is not None and batch.sample_plan is not None:
            fill_plan(batch.plan, self._lora.batch(shape.rows))
            fill_plan(batch.sample_plan, self._lora.batch(shape.rows, self._sample_indptr))
        blocks = ChunkBlocks(
            query_start=self._block_start[: shape.blocks + 1],
            context_lens=self._block_context[: shape.blocks],
            page_tables=self._page_tables.index_select(0, self._block_row[: shape.blocks]),
            size=BLOCK,
        )
        if self._states is not None:
            states = self._states.inputs(batch.query_start, shape.tokens, shape.tokens)
            batch = replace(batch, states=states)
        logits = self._logits[: shape.rows]
        # One buffer for all graphs: each one's own would be a gigabyte in all.
        logits.copy_(self._model.forward(replace(batch, blocks=blocks)))
        rows = slice(shape.rows)
        greedy_triton(logits, out=self.token_ids[rows], marked=self.marked[rows])
        return logits

    def _clear(self) -> None:
        """Make every row padding, so that a step over the buffers writes nothing to the arena.

        Clears indices too: those of a larger bucket would lead outside a smaller one.
        """
        self._slots.fill_(-1)
        for buffer in (self._query_start, self._block_start, self._sample_indptr):
            buffer.zero_()
        for indices in (self._token_ids, self._block_row, self._sample_rows):
            indices.zero_()
        if self._states is not None:
            self._states.clear()
        self._lora.clear()


def cut_blocks(
    lengths: npt.NDArray[np.int32], contexts: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Cut prompts into blocks: (first token [N + 1], context [N], row [N]).

    lengths   [S] new tokens of each row; 1: a decode
    contexts  [S] tokens of each row, the new ones included

    A block's context ends with its own last token. Decodes between two prompts are a block without
    context.
    """
    starts, context, rows = [0], [], []
    end = 0
    ends = np.cumsum(lengths)
    for row in np.nonzero(lengths > 1)[0].tolist():
        first, last = int(ends[row] - lengths[row]), int(ends[row])
        if first > end:
            starts.append(first)
            context.append(0)
            rows.append(0)
        for block_end in (*range(first + BLOCK, last, BLOCK), last):
            starts.append(block_end)
            context.append(int(contexts[row]) - (last - block_end))
            rows.append(row)
        end = last
    as_array = (np.array(values, np.int32) for values in (starts, context, rows))
    return tuple(as_array)  # type: ignore[return-value]
