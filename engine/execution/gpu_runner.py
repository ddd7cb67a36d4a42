"""Batches on a GPU: decodes and short prompts replay graphs, the rest goes launch by launch.

Either way the tokens are chosen on the device, and the host need not wait for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from contract.messages.sampling import MAX_LOGPROBS
from engine.errors import UnsupportedModel
from engine.execution.batch import Batch
from engine.execution.decode_graphs import BUCKETS, DecodeGraphs
from engine.execution.gpu_batch import ChunkBlocks, GpuBatch
from engine.execution.gpu_decoder import GpuModel
from engine.execution.lora_inputs import MAX_BLOCKS, MAX_ENTRIES, LoraInputs
from engine.execution.lora_table import LoraScope
from engine.execution.mask_uploads import Masks, MaskUploads
from engine.execution.mixed_graphs import BLOCK, MixedGraphs, cut_blocks
from engine.execution.prompt_scores import Scores
from engine.execution.uploads import upload
from engine.model.config import ModelConfig
from engine.model.weights import LINEARS, LayerWeights, Weights
from engine.sampling.sampler import Draw, Drawn, Sampled
from kernels import NUM_PROJECTIONS, LoraBatch, LoraTable, PageLayout
from kernels.attention_decode import DecodeWorkspace
from kernels.fp8 import Fp8Matrix
from kernels.lora.apply import block_of
from kernels.lora.plan import RANK_BLOCK, make_plan
from kernels.sampling import OVERFLOWED, fill_unread_triton, greedy_triton

# Width of a gated delta net's heads of k and of v in 16 bits: on an H200 (Triton 3.6) prompts of
# narrow heads came out wrong, those of this width right.
_PROVEN_WIDTH = 128

# Number of decodes in a step without a graph from which they use the decode kernel: in the prefill
# kernel each of them is a block of its own with one token.
_MANY_DECODES = 16

# Numbers of rows whose steps are timed at the start, for drafts.
_TIMED = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)


@dataclass(slots=True, kw_only=True)
class Tokens:
    """A launched step's tokens, on their way to the host.

    host        [N] int64, as `kernels.sampling.mark_ref` and `Drawn` have them
    arrived     None: they are there
    drawn       what the rows that are not greedy were drawn from
    later       launches their choice; None: it is launched
    can_replay  whether `GpuRunner.replay` may follow: all rows are decodes of one graph
    were_wrong  whether the device used another token than `sampled` returned
    """

    host: torch.Tensor | None = None
    arrived: torch.cuda.Event | None = None
    drawn: Drawn | None = None
    later: Callable[[], None] | None = None
    can_replay: bool = False
    were_wrong: bool = False

    def choose(self) -> None:
        """Launch the choice of the tokens, unless that has been done.

        The tokens of the step before must have been read: masks follow from them.
        """
        if self.later is not None:
            later, self.later = self.later, None
            later()

    def sampled(self) -> list[Sampled]:
        """Wait for the step; return one token for each row."""
        assert self.host is not None
        if self.arrived is not None:
            self.arrived.synchronize()
        token_ids: list[int] = self.host.tolist()
        if min(token_ids, default=0) >= 0:
            return [Sampled(token_id, None) for token_id in token_ids]
        have_overflowed = [token_id == OVERFLOWED for token_id in token_ids]
        token_ids = [0 if t == OVERFLOWED else t for t in token_ids]
        if self.drawn is not None and min(token_ids) < 0:
            guessed = list(token_ids)
            self.drawn.draw.mend(token_ids, self.drawn)
            self.were_wrong = any(
                was < 0 and ~was != token_id
                for was, token_id in zip(guessed, token_ids, strict=True)
            )
        return [
            Sampled(token_id, None, largest=math.inf if has_overflowed else 0.0)
            for token_id, has_overflowed in zip(token_ids, have_overflowed, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The place where a step without a graph leaves its tokens, like `DecodeGraphs`."""

    token_ids: torch.Tensor
    marked: torch.Tensor


class GpuRunner:
    """Owns the graphs and their buffers.

    entry_buffers  where entries of the adapters' table stay on the device
    max_running  the most sequences a step can have
    max_tokens   the most tokens a step can have
    max_drafted  the most rows of a decode with drafts; None: there are none, nor `Batch.states`
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        weights: Weights,
        layout: PageLayout,
        arena: torch.Tensor,
        max_positions: int,
        max_running: int,
        max_tokens: int,
        max_drafted: int | None = None,
    ) -> None:
        _check(model, weights, arena.dtype)
        self._model = GpuModel(
            config=model, weights=weights, layout=layout, arena=arena, max_positions=max_positions
        )
        self._num_heads, self._layout = model.num_heads, layout
        self._max_running, self._max_tokens = max_running, max_tokens
        max_rows = max(max_running, max_drafted or 0)
        rows, max_pages = min(max_rows, BUCKETS[-1]), -(-max_positions // layout.page_size)
        lora = LoraInputs(
            arena.device,
            max_rows=rows,
            max_tokens=max(rows, max_tokens),
            max_entries=MAX_ENTRIES,
            max_blocks=MAX_BLOCKS,
        )
        self.entry_buffers = lora.buffers
        self._graphs = DecodeGraphs(
            self._model,
            max_batch=rows,
            max_pages=max_pages,
            lora=lora,
            keeps_states=max_drafted is not None,
        )
        self._mixed = MixedGraphs(
            self._model,
            max_tokens=max_tokens,
            max_rows=min(max_running, BUCKETS[-1]),
            max_pages=max_pages,
            lora=lora,
        )
        self._plain = Chosen(
            token_ids=torch.zeros(max_rows, dtype=torch.int64, device=arena.device),
            marked=torch.zeros(max_rows, dtype=torch.int64, device=arena.device),
        )
        self._masks = MaskUploads(arena.device, max_rows, model.vocab_size)
        # Two, because a step is launched before the tokens of the one before it are read.
        self._fetched = torch.empty(2, max_rows, dtype=torch.int64, pin_memory=arena.is_cuda)
        self._turn = 0
        self._chosen: torch.Tensor | None = None  # the newest step's tokens, on the device
        self._draw: Draw | None = None  # what its rows that are not greedy were drawn by

    def warm_up(self) -> None:
        """Record every graph, so that no request waits for one."""
        for size in self._graphs.sizes:
            for scope in LoraScope:
                self._graphs.capture(size, scope)
        for size in self._mixed.sizes:
            for scope in LoraScope:
                self._mixed.capture(size, scope, self._graphs.pool)

    def time_steps(self) -> tuple[tuple[int, float], ...]:
        """Return (rows, milliseconds) of steps of a few sizes, of the base alone; () off a GPU."""
        if self._model.device.type != "cuda":
            return ()
        sizes = [size for size in self._graphs.sizes if size in _TIMED]
        return tuple((size, self._graphs.time(size)) for size in sizes)

    def profile_run(self) -> int:
        """Run what takes the most memory: a step of `max_tokens` tokens, the largest graphs.

        Needs an arena of one page and writes nothing to it. Returns the bytes that `warm_up` will
        take in addition.
        """
        recorded = self._graphs.sizes[-1]
        for scope in LoraScope:
            self._graphs.capture(recorded, scope)
            self._mixed.capture(self._mixed.sizes[-1], scope, self._graphs.pool)
        widest = _widest(self._max_tokens, self._max_running, self._model)
        widest = replace(widest, scores=_most_scores(self._max_tokens, self._model))
        for may_fuse in (False, True):  # what a gain or bias forbids takes more memory
            self._model.forward(replace(self._gpu_batch(widest), may_fuse=may_fuse))
        return self._graphs.bytes_of_others(recorded) + self._mixed.bytes_of_others()

    def run(self, batch: Batch) -> torch.Tensor:
        """Return the logits [N, V] of the batch's sampling rows, valid until the next run.

        Placeholders in the batch stand for tokens of the step that was started last.
        """
        return self._run(batch)[0]

    def start(self, batch: Batch, draw: Draw | None, masks: Masks | None = None) -> Tokens:
        """Launch a batch and, unless there are masks, the choice of its tokens.

        draw   what the rows that are not greedy draw by; None: all are greedy
        masks  made by `Tokens.choose`, while the batch runs; None: no row has one
        """
        logits, graphs = self._run(batch)
        self._draw = draw
        if graphs is None and masks is None:
            self._choose_greedy(logits, self._plain)
        return self._launched(logits, graphs or self._plain, masks)

    def replay(
        self, new_pages: SequenceOf[tuple[int, int, int]], masks: Masks | None = None
    ) -> Tokens:
        """Run the rows of the last step one token further: their inputs are on the device.

        new_pages  (row, column of its page table, page) that the rows need for it
        """
        self._graphs.add_pages(new_pages)
        return self._launched(self._graphs.step(), self._graphs, masks)

    def _launched(
        self,
        logits: torch.Tensor,
        chosen: DecodeGraphs | MixedGraphs | Chosen,
        masks: Masks | None,
    ) -> Tokens:
        """Return the tokens of a pass whose greedy ones are chosen, unless there are masks."""
        tokens = Tokens(can_replay=chosen is self._graphs)
        if masks is None:
            self._fetch(tokens, logits, chosen)
        else:
            tokens.later = functools.partial(self._choose_masked, tokens, logits, chosen, masks)
        return tokens

    def _choose_masked(
        self,
        tokens: Tokens,
        logits: torch.Tensor,
        chosen: DecodeGraphs | MixedGraphs | Chosen,
        masks: Masks,
    ) -> None:
        self._masks.apply(logits, masks)
        self._choose_greedy(logits, chosen)
        self._fetch(tokens, logits, chosen)

    def _choose_greedy(
        self, logits: torch.Tensor, chosen: DecodeGraphs | MixedGraphs | Chosen
    ) -> None:
        rows = slice(logits.shape[0])
        if logits.shape[0]:
            greedy_triton(logits, chosen.token_ids[rows], chosen.marked[rows])

    def _run(self, batch: Batch) -> tuple[torch.Tensor, DecodeGraphs | MixedGraphs | None]:
        """Return the logits, and the graphs that computed them and the greedy tokens, if any."""
        if batch.has_unread:
            assert self._chosen is not None
            fill_unread_triton(batch.token_ids, self._chosen)
        # A graph keeps the logits of the rows that sample alone.
        if batch.scores is None and batch.pooled is None:
            if batch.is_drafted and self._fits_drafted(batch):
                self._load(_each_draft_a_row(batch))
                logits = self._graphs.step()[batch.sample_rows]
                self._keep(batch)
                return logits, None
            if self._is_decode(batch):
                self._load(batch)
                logits = self._graphs.step()
                self._keep(batch)
                return logits, self._graphs
            if self._mixed.fits(batch):
                for arrival in batch.arrivals:
                    arrival.await_all()  # 2 ms; launch by launch it would be hidden, and cost 15
                return self._mixed.run(batch), self._mixed
        own = self._gpu_batch(batch)
        if batch.states is not None:
            shape = (len(batch.sample_rows), self._model.config.hidden_size)
            batch.states.x = torch.empty(
                shape, dtype=self._model.arena.dtype, device=self._model.device
            )
            own = replace(own, kept=batch.states.x)
        return self._model.forward(own), None

    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, E] -> the base's logits [N, V]"""
        return self._model.head_logits(x)

    def _keep(self, batch: Batch) -> None:
        """Give the states of a graph's step to who asked for them: until the next step."""
        if batch.states is not None and self._graphs.kept is not None:
            batch.states.x = self._graphs.kept[batch.sample_rows]

    def _fits_drafted(self, batch: Batch) -> bool:
        """Return whether a graph holds a row for each draft."""
        num_rows, num_pages = batch.token_ids.shape[0], batch.page_tables.shape[1]
        return self._graphs.fits(num_rows, num_pages, batch.lora)

    def _is_decode(self, batch: Batch) -> bool:
        """Return whether the batch has only decodes, and a graph exists for it."""
        return (
            batch.max_new == 1
            and batch.sample_rows.shape[0] == batch.token_ids.shape[0]
            and self._graphs.fits(batch.token_ids.shape[0], batch.page_tables.shape[1], batch.lora)
        )

    def _fetch(
        self, tokens: Tokens, logits: torch.Tensor, chosen: DecodeGraphs | MixedGraphs | Chosen
    ) -> None:
        """Draw what is not greedy, into the `token_ids` of `chosen`, and send all to the host."""
        rows = slice(logits.shape[0])
        token_ids, marked = chosen.token_ids[rows], chosen.marked[rows]
        drawn = None if self._draw is None else self._draw.launch(logits, token_ids, marked)
        self._turn = 1 - self._turn
        self._chosen = token_ids
        tokens.host, tokens.drawn = self._fetched[self._turn, : len(token_ids)], drawn
        tokens.host.copy_(marked if drawn is None else drawn.marked, non_blocking=True)
        if token_ids.is_cuda:
            tokens.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            tokens.arrived.record()

    def _load(self, batch: Batch) -> None:
        for arrival in batch.arrivals:
            arrival.await_all()
        self._graphs.load(
            token_ids=batch.token_ids,
            context_lens=batch.context_lens,
            page_tables=batch.page_tables,
            states=batch.delta,
            lora=batch.lora,
            scope=batch.scope,
        )

    def _gpu_batch(self, batch: Batch) -> GpuBatch:
        num_tokens = batch.token_ids.shape[0]
        lora = batch.lora
        plan = sample_plan = None
        if lora is not None:
            block_t = block_of(num_tokens, lora.seg_adapter.shape[0])
            plan = make_plan(lora, num_tokens, block_t)
            before = torch.searchsorted(batch.sample_rows, lora.seg_indptr.long(), out_int32=True)
            sampled = replace(lora, seg_indptr=before)
            sample_plan = make_plan(sampled, batch.sample_rows.shape[0], RANK_BLOCK)
        states, delta = batch.delta, self._model.delta
        workspace, blocks = None, None
        num_rows, num_decodes = len(batch.lengths), int((batch.lengths == 1).sum())
        if batch.max_new > 1 and num_decodes >= _MANY_DECODES:
            blocks = _blocks(batch)
        if batch.max_new == 1 or blocks is not None:
            workspace = DecodeWorkspace(
                num_rows, self._num_heads, self._layout, batch.token_ids.device
            )
        return GpuBatch(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            context_lens=batch.context_lens,
            page_tables=batch.page_tables,
            max_new=batch.max_new,
            blocks=blocks,
            workspace=workspace,
            sample_rows=batch.sample_rows,
            table=None if lora is None else lora.table,
            plan=plan,
            sample_plan=sample_plan,
            arrivals=batch.arrivals,
            extras=None if lora is None else lora.extras,
            scores=batch.scores,
            states=None
            if states is None or delta is None
            else delta.inputs(states, batch.query_start, num_tokens, batch.max_new),
            pooled=batch.pooled,
        )


def _check(model: ModelConfig, weights: Weights, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel for sizes that the kernels do not take."""
    layers = (model.widths(layer) for layer in range(model.num_layers))
    if any(width % 8 for widths in layers for pair in widths for width in pair):
        raise UnsupportedModel("on a GPU, sizes of the model have to be multiples of 8")
    if any(width % 16 for layer in weights.layers for width in _fp8_widths(layer)):
        raise UnsupportedModel(
            "on a GPU, sizes of linears in FP8 have to be multiples of 16: leave out "
            "LORIKEET_BASE_PRECISION",
            param="base_precision",
        )
    delta = model.plan.delta
    widths = set() if delta is None else {delta.key_dim, delta.value_dim}
    if dtype.itemsize < 4 and widths - {_PROVEN_WIDTH}:
        raise UnsupportedModel(
            "on a GPU, gated delta nets whose heads are not 128 wide are served in float32 "
            'alone: use a CPU, or dtype "float32"',
            param="dtype",
        )


def _fp8_widths(layer: LayerWeights) -> list[int]:
    matrices = (getattr(layer, name) for name in LINEARS)
    return [width for each in matrices if isinstance(each, Fp8Matrix) for width in each.shape]


def _each_draft_a_row(batch: Batch) -> Batch:
    """Make a decode of each draft: rows of the same pages, each with one token more than the last.

    A layer writes the keys and values of all rows before any of them attends.
    """
    row = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    [row_ids] = upload([row], batch.page_tables.device)
    return replace(
        batch,
        context_lens=batch.positions.to(torch.int32) + 1,
        page_tables=batch.page_tables.index_select(0, row_ids),
    )


def _blocks(batch: Batch) -> ChunkBlocks:
    """Cut the prompts of a step that has decodes too."""
    device = batch.page_tables.device
    start, context, row = upload(cut_blocks(batch.lengths, batch.contexts), device)
    return ChunkBlocks(
        query_start=start,
        context_lens=context,
        page_tables=batch.page_tables.index_select(0, row),
        size=BLOCK,
    )


def _most_scores(num_tokens: int, model: GpuModel) -> Scores:
    """Make scores for every row, with as many alternatives as a request may ask for."""
    rows = torch.arange(num_tokens, device=model.device)
    return Scores(rows, torch.zeros_like(rows), min(MAX_LOGPROBS, model.config.vocab_size))


def _widest(num_tokens: int, max_running: int, model: GpuModel) -> Batch:
    """Make the widest batch: prompts that share one adapter, whose tiles have no pages."""
    device = model.device
    num_rows = min(max_running, num_tokens)
    ends = torch.arange(1, num_rows + 1, device=device) * num_tokens // num_rows
    query_start = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    context_lens = query_start.diff()
    max_new = -(-num_tokens // num_rows)
    num_tiles = 2 * MAX_BLOCKS
    num_entries = model.config.num_layers * NUM_PROJECTIONS * num_tiles
    nowhere = torch.full((num_entries,), -1, device=device)
    table = LoraTable(
        entry_start=nowhere.new_zeros(1),
        num_tiles=torch.full((1,), num_tiles, dtype=torch.int32, device=device),
        a_offset=nowhere,
        b_offset=nowhere,
        rows=torch.zeros(num_entries, dtype=torch.int32, device=device),
        scale=torch.zeros(num_entries, device=device),
    )
    return Batch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slots=torch.full((num_tokens,), -1, device=device),
        query_start=query_start,
        context_lens=context_lens,
        max_new=max_new,
        page_tables=context_lens.new_zeros(num_rows, -(-max_new // model.layout.page_size)),
        sample_rows=ends - 1,
        lora=LoraBatch(
            table=table,
            seg_indptr=query_start[[0, -1]],
            seg_adapter=query_start.new_zeros(1),
            max_tiles=num_tiles,
        ),
        adapter_keys=(),
        delta=None if model.delta is None else model.delta.nowhere(num_rows),
        lengths=np.full(num_rows, max_new, np.int32),
        contexts=np.full(num_rows, max_new, np.int32),
    )
