"""The gated delta nets of a GPU's pass, and their pages in the buffers of recorded graphs."""

from __future__ import annotations

import torch

from engine.model.config import ModelConfig
from engine.model.delta_states import StatePages
from kernels.delta import DeltaWeights
from kernels.delta_gpu.decode import delta_decode_triton
from kernels.delta_gpu.inputs import DeltaInputs, Projected, make_inputs
from kernels.delta_gpu.prefill import chunk_of, delta_prefill_triton


class GpuDelta:
    """The gated delta nets of a model, over states in pages of the arena."""

    def __init__(self, config: ModelConfig, arena: torch.Tensor) -> None:
        assert config.plan.delta is not None
        self._shape, self._eps = config.plan.delta, config.plan.eps
        self._arena, self._chunk = arena.view(torch.float32), chunk_of(arena.dtype)
        numbers = self._shape.state_size * len(config.plan.delta_layers)
        self.num_pages = -(-numbers // self._arena.shape[1])

    def mix(
        self, inputs: DeltaInputs, given: Projected, weights: DeltaWeights, index: int
    ) -> torch.Tensor:
        """Mix what the delta net `index` of all has projected -> [T, value_size]"""
        shape, arena, first = self._shape, self._arena, index * self._shape.state_size
        out = given.base.new_empty(len(given.base), shape.value_size)
        delta_decode_triton(given, weights, arena, inputs, shape, first, self._eps, out)
        if inputs.chunk_row is not None:
            delta_prefill_triton(given, weights, arena, inputs, shape, first, self._eps, out)
        return out

    def inputs(
        self, pages: StatePages, query_start: torch.Tensor, num_tokens: int, max_new: int
    ) -> DeltaInputs:
        """Return what all layers of a step read; max_new 1: it has nothing but decodes."""
        return self.inputs_of(_read(pages), pages.write, query_start, num_tokens, max_new)

    def inputs_of(
        self,
        read: torch.Tensor,
        write: torch.Tensor,
        query_start: torch.Tensor,
        num_tokens: int,
        max_new: int,
    ) -> DeltaInputs:
        """As `inputs`, of pages [S, pages]; -1: zero, or written nowhere."""
        chunk = None if max_new == 1 else self._chunk
        return make_inputs(query_start, read, write, num_tokens, chunk)

    def nowhere(self, num_rows: int) -> StatePages:
        """Return the pages of sequences whose states are zero and written nowhere."""
        pages = torch.full((num_rows, self.num_pages), -1, device=self._arena.device)
        return StatePages(pages, pages, pages[:, 0] < 0)


class StateTables:
    """A step's state pages in fixed buffers, which recorded graphs read."""

    def __init__(self, delta: GpuDelta, max_rows: int) -> None:
        self._delta = delta
        self._read, self._write = (delta.nowhere(max_rows).read for _ in range(2))

    def load(self, pages: StatePages, size: int) -> None:
        """Set the pages of the next step, whose graph has `size` rows."""
        num_rows = len(pages.read)
        for buffer, new in ((self._read, _read(pages)), (self._write, pages.write)):
            buffer[:num_rows].copy_(new)
            buffer[num_rows:size].fill_(-1)

    def inputs(self, query_start: torch.Tensor, num_tokens: int, max_new: int) -> DeltaInputs:
        """See `GpuDelta.inputs`."""
        rows = slice(len(query_start) - 1)
        read, write = self._read[rows], self._write[rows]
        return self._delta.inputs_of(read, write, query_start, num_tokens, max_new)

    def advance(self, size: int) -> None:
        """Let the next step read what this one has written."""
        self._read[:size].copy_(self._write[:size])

    def clear(self) -> None:
        """Make every row one whose state is written nowhere."""
        self._read.fill_(-1)
        self._write.fill_(-1)


def _read(pages: StatePages) -> torch.Tensor:
    """Return the pages to read, -1 where nothing is computed yet."""
    return pages.read.masked_fill(pages.is_new[:, None], -1)
