"""GpuBatch: the inputs of one pass of the GPU's decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.adapters.copies import Arrival
from engine.execution.prompt_scores import Scores
from kernels import LoraExtras, LoraTable
from kernels.attention_decode import DecodeWorkspace
from kernels.delta_gpu.inputs import DeltaInputs
from kernels.lora.plan import LoraPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBlocks:
    """The prompts of a step for the prefill kernel, cut into blocks of at most `size` new tokens.

    Each is a sequence: of the rows query_start[b]:query_start[b + 1], with a context that ends with
    its own last token. A block with context 0 stands for decodes between two prompts.
    """

    query_start: torch.Tensor  # [N + 1] int32
    context_lens: torch.Tensor  # [N] int32
    page_tables: torch.Tensor  # [N, max_pages] int32
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBatch:
    """One pass's inputs, as in `engine.execution.batch.Batch`, and its work list.

    max_new    the longest chunk; 1: nothing but decodes
    blocks     given, the prefill kernel computes these and the decode kernel all other rows
    workspace  of the decode kernel; None: a new one
    sample_rows  None: every row
    scores       what the pass is to tell of prompts; never in a graph
    table, plan  both None for a pass without adapters
    sample_plan  the work list of the sample rows alone
    arrivals  copies of adapters that the pass overtakes: each layer waits for its part
    is_in_line    whether adapters' kernels take turns with the products instead of running beside
    is_mlp_plain  whether no adapter of the pass changes gate, up or down
    may_fuse   False: gate and up are written as in short passes, which takes the most memory
    extras     None when no adapter has more than tiles; in a graph without `segments`
    states     of the gated delta nets; None: the model has none
    kept       [N or more, E] takes what the last matrix reads for each row of the logits
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    page_tables: torch.Tensor
    max_new: int
    blocks: ChunkBlocks | None = None
    workspace: DecodeWorkspace | None = None
    sample_rows: torch.Tensor | None = None
    table: LoraTable | None = None
    plan: LoraPlan | None = None
    sample_plan: LoraPlan | None = None
    is_in_line: bool = False
    is_mlp_plain: bool = False
    may_fuse: bool = True
    arrivals: tuple[Arrival, ...] = ()
    extras: LoraExtras | None = None
    scores: Scores | None = None
    states: DeltaInputs | None = None
    kept: torch.Tensor | None = None
