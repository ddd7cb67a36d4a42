"""DecodeGraphs: decode steps as CUDA graphs, one per batch bucket and LoraScope.

The graph's inputs lie in fixed buffers. A step's grids depend on the bucket alone (the work list
and its length are device data), so neither the number of adapters nor their ranks are part of a
graph's key. Each replay leaves the buffers ready for the next one: the greedy token is the next
input, and positions and slots follow from the context length. While the same requests run, the host
uploads nothing but new pages, and waits for nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.execution.gpu_batch import GpuBatch
from engine.execution.gpu_decoder import GpuModel
from engine.execution.lora_inputs import LoraInputs
from engine.execution.lora_table import LoraScope
from engine.model.delta_states import StatePages
from engine.model.gpu_delta import StateTables
from kernels import LoraBatch
from kernels.attention_decode import DecodeWorkspace
from kernels.lora.plan import LoraPlan, empty_plan, fill_plan
from kernels.sampling import advance_triton, greedy_triton

# Not 224 or 448: the library takes longer for them than for 256 or 512 (H200, a layer: 177 us for
# 224, 173 for 256; 407 for 448, 301 for 512).
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512)
# Bytes of a recorded graph beside the tensors in it (600 nodes; measured on an H200).
GRAPH_BYTES = 4 << 20


_uncollected_lock = threading.Lock()


@dataclass(slots=True, kw_only=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from running inside; one thread at a time may enter.

    The collector runs on whatever thread allocates. If it destroyed the graph of a former engine on
    a thread that records, CUDA would end the recording.
    """
    with _uncollected_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def record(
    run: Callable[[], torch.Tensor], pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Record what `run` launches; return the graph and the tensor that every replay writes.

    Other threads may use the device during the recording. With torch's default mode the recording
    would fail whenever an adapter is loaded beside it. A launch keeps the priority of the stream
    that it was recorded on.

    pool    memory of another graph, which this one may use in turn; None: a new pool
    stream  the same for all graphs of a pool: torch gives a stream's memory to no other
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles the kernels and sets up the libraries
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with uncollected(), recording:
        out = run()
    return graph, out


class DecodeGraphs:
    """Fixed input buffers and the graphs that read them.

    max_pages  columns of the page tables
    keeps_states  whether `kept` [max_batch, E] takes what the last matrix reads; else it is None
    lora       the step's adapters; as many rows as `max_batch` at least

    A step beyond these runs without a graph.
    """

    def __init__(
        self,
        model: GpuModel,
        *,
        max_batch: int,
        max_pages: int,
        lora: LoraInputs,
        keeps_states: bool = False,
    ) -> None:
        self._model = model
        device = model.device
        self.max_batch = max_batch
        self._lora = lora

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.token_ids = ints(max_batch, dtype=torch.int64)
        self.marked = ints(max_batch, dtype=torch.int64)
        self.positions = ints(max_batch, dtype=torch.int64)
        self.slots = ints(max_batch, dtype=torch.int64)
        self.context_lens = ints(max_batch)
        self.page_tables = ints(max_batch, max_pages)
        self._states = None if model.delta is None else StateTables(model.delta, max_batch)
        self.kept: torch.Tensor | None = None
        if keeps_states:
            shape = (max_batch, model.config.hidden_size)
            self.kept = torch.zeros(shape, dtype=model.arena.dtype, device=device)
        self._query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._workspaces: dict[int, DecodeWorkspace] = {}
        self._plans: dict[int, LoraPlan] = {}
        self._graphs: dict[tuple[int, LoraScope], _Graph] = {}
        self.pool: Any = None  # memory for intermediate results of graphs
        self._current: tuple[int, LoraScope] = (0, LoraScope.NONE)
        self.num_rows = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets, the smallest first."""
        return (*(size for size in BUCKETS if size < self.max_batch), self.max_batch)

    def bucket(self, num_rows: int) -> int | None:
        """Return the smallest bucket for this number of rows; None when there is none."""
        return next((size for size in self.sizes if num_rows <= size), None)

    def fits(self, num_rows: int, max_pages: int, lora: LoraBatch | None) -> bool:
        """Return whether such a decode step has a graph."""
        if num_rows > self.max_batch or max_pages > self.page_tables.shape[1]:
            return False
        return self._lora.fits(lora)

    def capture(self, size: int, scope: LoraScope) -> None:
        """Record the graph of a bucket, unless it is there or the device has none.

        Not while a step is under way: the input buffers are cleared.
        """
        if (size, scope) in self._graphs or self._model.device.type != "cuda":
            return
        batch = self._batch(size, scope)
        self.clear()
        stream = self._model.recording_stream
        assert stream is not None
        graph, logits = record(lambda: self._run(batch, size), self.pool, stream)
        self.pool = self.pool or graph.pool()
        self._graphs[size, scope] = _Graph(graph=graph, logits=logits)

    def bytes_of_others(self, recorded: int) -> int:
        """Return the bytes that all graphs take beyond those of the recorded bucket.

        The graphs share memory for intermediate results; each has logits of its own.
        """
        logits = self._model.config.vocab_size * self._model.arena.element_size()
        others = (size for size in self.sizes if size != recorded)
        return sum(len(LoraScope) * (size * logits + GRAPH_BYTES) for size in others)

    def load(
        self,
        *,
        token_ids: torch.Tensor,
        context_lens: torch.Tensor,
        page_tables: torch.Tensor,
        states: StatePages | None,
        lora: LoraBatch | None,
        scope: LoraScope,
    ) -> None:
        """Set the inputs of the next step; the caller has asked `fits`."""
        rows = token_ids.shape[0]
        size = self.bucket(rows)
        assert size is not None
        self.capture(size, scope)
        self._current, self.num_rows = (size, scope), rows
        self.token_ids[:rows].copy_(token_ids)
        self.context_lens[:rows].copy_(context_lens - 1)  # before the step
        self.context_lens[rows:size].fill_(-1)
        self.page_tables[:rows, : page_tables.shape[1]].copy_(page_tables)
        if self._states is not None and states is not None:
            self._states.load(states, size)
        if lora is not None:
            self._lora.load(lora, size)

    def add_pages(self, pages: SequenceOf[tuple[int, int, int]]) -> None:
        """Append to the page tables: (row, column, page)."""
        if pages:
            place = torch.tensor(pages, dtype=torch.int64).to(self._model.device, non_blocking=True)
            row, column, page = place.unbind(1)
            self.page_tables.index_put_((row, column), page.to(torch.int32))

    def step(self) -> torch.Tensor:
        """Run a step; return the rows' logits [num_rows, V], valid until the next step.

        `token_ids` holds the greedy tokens; a sampler may write others before the next step.
        `marked` says which of them come from numbers that overflowed (`kernels.sampling`).
        """
        if self._model.device.type != "cuda":  # no graphs there: the same pass, launch by launch
            size, scope = self._current
            return self._run(self._batch(size, scope), size)[: self.num_rows]
        entry = self._graphs[self._current]
        entry.graph.replay()
        return entry.logits[: self.num_rows]

    def clear(self) -> None:
        """Make every row padding: a step over such buffers writes nothing to the arena."""
        self.context_lens.fill_(-1)
        if self._states is not None:
            self._states.clear()
        self._lora.clear()

    def _batch(self, size: int, scope: LoraScope) -> GpuBatch:
        """Return a view of the buffers' first `size` rows."""
        model = self._model
        if size not in self._workspaces:
            self._workspaces[size] = DecodeWorkspace(
                size, model.config.num_heads, model.layout, model.device
            )
        batch = GpuBatch(
            token_ids=self.token_ids[:size],
            positions=self.positions[:size],
            slots=self.slots[:size],
            query_start=self._query_start[: size + 1],
            context_lens=self.context_lens[:size],
            page_tables=self.page_tables[:size],
            max_new=1,
            workspace=self._workspaces[size],
            kept=self.kept,
        )
        if not scope:
            return batch
        if size not in self._plans:
            self._plans[size] = empty_plan(size, size, self._lora.max_blocks, 16, model.device)
        return replace(
            batch,
            table=self._lora.table,
            plan=self._plans[size],
            is_mlp_plain=scope is LoraScope.ATTENTION,
            extras=self._lora.extras(size) if scope is LoraScope.ADJUSTED else None,
        )

    def _run(self, batch: GpuBatch, size: int) -> torch.Tensor:
        if batch.plan is not None:
            fill_plan(batch.plan, self._lora.batch(size))
        advance_triton(
            batch.context_lens,
            batch.positions,
            batch.slots,
            batch.page_tables,
            self._model.layout.page_size,
        )
        if self._states is not None:
            batch = replace(batch, states=self._states.inputs(batch.query_start, size, 1))
        logits = self._model.forward(batch)
        if self._states is not None:
            self._states.advance(size)
        greedy_triton(logits, out=batch.token_ids, marked=self.marked[:size])
        return logits
