"""The decoder on a GPU: one forward pass over fused kernels and the page arena.

Per layer nine launches without adapters: norm, qkv, RoPE + KV write, attention, o, norm, gate/up,
SiLU * mul, down. In a long pass o and down add themselves to the residual inside the product, and
gate/up and SiLU * mul are one launch. The biases and the norms of each head that other families
than Llama have ride along in these; a norm after attention or MLP, a LayerNorm and a norm of all
heads are launches of their own. Experts take five in the place of the last three. Adapters add a
shrink and an expand beside each of the four matrix products, on a stream of their own; whoever
reads the product adds the two. Nothing here waits for the device, so a pass can be captured in a
CUDA graph (engine/execution/decode_graphs.py).

Where a matrix is in FP8, whoever writes its input quantises it, and whoever reads the product
applies the scales; after the attention a launch of its own quantises. Adapters read the input as it
was before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from engine.execution.gpu_batch import GpuBatch
from engine.model.config import ModelConfig
from engine.model.gpu_delta import GpuDelta
from engine.model.rope import LayerRopes
from engine.model.weights import LayerWeights, Matrix, Weights
from kernels import LoraExtras, PageLayout, Projection
from kernels.attention_decode import attention_decode_triton
from kernels.attention_prefill import attention_prefill_triton
from kernels.delta_gpu.inputs import Projected
from kernels.experts.grouped import Shared, expert_mlp_triton
from kernels.fp8 import (
    Activation,
    Fp8Matrix,
    Fp8Rows,
    Scales,
    apply_scales_triton,
    empty_rows,
    fp8_product,
    quantize_rows_triton,
)
from kernels.gate_up import can_fuse, gate_up_silu_triton
from kernels.gates import Packed, gate_heads_triton, split_heads_triton
from kernels.int4 import Int4Matrix, int4_linear
from kernels.linear import linear
from kernels.lora.adjust import lora_adjust_triton
from kernels.lora.expand import lora_expand_triton
from kernels.lora.plan import MANY_CHUNKS, RANK_BLOCK
from kernels.lora.rows import replace_embedded_triton, replace_logits_triton
from kernels.lora.shrink import lora_shrink_triton
from kernels.lora.vocab import lora_embed, lora_head, sampled
from kernels.rms_norm import norm_triton
from kernels.rope import rope_kv_write_triton
from kernels.silu_mul import lora_silu_mul_triton, silu_mul_fp8_triton, silu_mul_triton

QKV = (Projection.Q, Projection.K, Projection.V)
DELTA = (*QKV, Projection.DECAY)
GATE_UP = (Projection.GATE, Projection.UP)
DOWN = (Projection.DOWN,)

# Most projections of one launch of the adapters' kernels.
_TOGETHER = 3

# Number of rows from which a pass is bound by its products, not by reading the weights.
_LONG = 512

# Number of rows up to which SiLU * mul in FP8 fills a GPU only if each row is cut into parts.
_SHORT = 16

# Number of rows from which gate, up and SiLU * mul are one launch, whose tiles are large.
_FUSED = 2048

# Priorities of streams; the smaller goes first. A recorded graph keeps them.
_AFTER, _RECORDED, _BEFORE = 0, -1, -2

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Product(NamedTuple):
    """The parts of a linear's output [T, N] for whoever reads it: base * scales + delta.

    delta   what the adapters add; None: nothing
    scales  None: the base's part has none
    """

    base: torch.Tensor
    delta: torch.Tensor | None = None
    scales: Scales | None = None


class _Linear(NamedTuple):
    """A linear that adds to the residual, and the norm of what it adds; None: there is none."""

    weight: Matrix
    bias: torch.Tensor | None
    out_norm: torch.Tensor | None


#: A norm's weight, and the matrix that multiplies what is normed; None: there is none.
_Norm = tuple[torch.Tensor | None, Matrix | None]


class GpuModel:
    """Weights, arena and rotation tables; `forward` turns a batch into logits.

    recording_stream  where its graphs are recorded; None without a GPU
    delta  None: it has no gated delta nets
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        weights: Weights,
        layout: PageLayout,
        arena: torch.Tensor,
        max_positions: int,
        linear: Linear = linear,
    ) -> None:
        self.config, self.weights, self.layout, self.arena = config, weights, layout, arena
        self._tiles = layout.tiles(arena)
        self.device = arena.device
        self._linear = linear
        self._plan, self._scale = config.plan, config.attention_scale
        ropes = LayerRopes(config.head_dim, config.plan.rotations, max_positions, self.device)
        ropes.extend_to(max_positions)
        self._ropes = ropes.layers
        self._widths = [config.widths(layer) for layer in range(config.num_layers)]
        self.delta = None if config.plan.delta is None else GpuDelta(config, arena)
        # Which of the gated delta nets a layer has, or which of the layers with attention it is.
        before = [
            sum(i < layer for i in config.plan.delta_layers) for layer in range(config.num_layers)
        ]
        self._places = [
            before[i] if i in config.plan.delta_layers else i - before[i]
            for i in range(config.num_layers)
        ]
        self._before: torch.cuda.Stream | None = None
        self._after: torch.cuda.Stream | None = None
        self.recording_stream: torch.cuda.Stream | None = None
        if arena.is_cuda:
            make_stream: Any = torch.cuda.Stream
            self._before = make_stream(self.device, priority=_BEFORE)
            self._after = make_stream(self.device, priority=_AFTER)
            self.recording_stream = make_stream(self.device, priority=_RECORDED)

    def forward(self, batch: GpuBatch) -> torch.Tensor:
        """Compute the logits of the rows to sample; write the new tokens' KV to the arena."""
        weights, plan = self.weights, self._plan
        # After the last attention nobody reads the other rows: 2.6% of a prefill of 32 layers.
        is_cut = batch.sample_rows is not None and batch.scores is None and not plan.is_parallel
        residual = functional.embedding(batch.token_ids, weights.embedding)
        if batch.extras is not None:
            for arrival in batch.arrivals:
                arrival.await_layer(0)
            self._embed(residual, batch.token_ids, batch.extras)
        residual = plan.embedded(residual)
        before: list[_Norm] = [(layer.attention_norm, layer.qkv) for layer in weights.layers]
        following = [*before[1:], (weights.norm, None)]
        normed = self._normed(batch, residual, before[0])
        for index, (layer, after) in enumerate(zip(weights.layers, following, strict=True)):
            for arrival in batch.arrivals:
                arrival.await_layer(index)
            attended = self._attention(batch, index, layer, normed)
            if batch.sample_rows is not None and is_cut and index == len(weights.layers) - 1:
                attended = Activation(attended.given[batch.sample_rows])
                residual = residual[batch.sample_rows]
                extras = batch.extras and sampled(batch.extras, batch.sample_rows)
                slots = batch.slots[batch.sample_rows]
                batch = replace(batch, plan=batch.sample_plan, extras=extras, slots=slots)
            inner = attended if attended.fp8 else _quantized(attended.given, layer.o)
            linear = _Linear(layer.o, layer.o_bias, layer.attention_out_norm)
            between = None if plan.is_parallel else (layer.mlp_norm, layer.gate_up)
            read, residual = self._residual_linear(
                batch, index, Projection.O, inner, linear, residual, between
            )
            read = normed if plan.is_parallel else read
            if layer.experts is not None:
                made = self._run_experts(batch, index, layer, read.given)
                normed, residual = self._add(batch, _Product(made), residual, after)
                continue
            inner = self._mlp(batch, index, layer, read)
            linear = _Linear(layer.down, layer.down_bias, layer.mlp_out_norm)
            normed, residual = self._residual_linear(
                batch, index, Projection.DOWN, inner, linear, residual, after
            )
        states = normed.given
        if batch.scores is not None:
            scored = states[batch.scores.rows]
            batch.scores.compute(scored, self._logits, self.config.vocab_size)
        if batch.sample_rows is not None and not is_cut:
            states = states[batch.sample_rows]
            extras = batch.extras and sampled(batch.extras, batch.sample_rows)
            batch = replace(batch, extras=extras)
        if batch.kept is not None:
            batch.kept[: len(states)].copy_(states)
        return self._logits(states, batch.extras)

    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, E] -> the base's logits [N, V]"""
        return self._plan.scaled(self._linear(x, self.weights.lm_head))

    def _logits(self, x: torch.Tensor, extras: LoraExtras | None) -> torch.Tensor:
        """x [N, E] -> [N, V]; extras: of these rows."""
        logits = self._linear(x, self.weights.lm_head)
        if extras is not None:
            if extras.head_rows is not None:
                rows, row_adapter = extras.head_rows, extras.row_adapter
                replace_logits_triton(logits, x, self.arena, rows, row_adapter)
            lora_head(logits, x, self.arena, extras)
        return self._plan.scaled(logits)

    def _embed(self, hidden: torch.Tensor, token_ids: torch.Tensor, extras: LoraExtras) -> None:
        """Change the embeddings [T, E] of the rows whose adapters do, in place."""
        rows = extras.embedding_rows
        if rows is not None:
            replace_embedded_triton(hidden, token_ids, self.arena, rows, extras.row_adapter)
        lora_embed(hidden, token_ids, self.arena, extras)

    def _attention(
        self, batch: GpuBatch, index: int, layer: LayerWeights, x: Activation
    ) -> Activation:
        """Return what attention, or a gated delta net, makes of x, before the o projection."""
        if layer.delta is not None:
            return self._mix(batch, index, layer, x)
        qkv, delta, scales = self._linear_with_lora(
            batch, index, QKV, x, layer.qkv, later=layer.qkv_bias
        )
        norm, bias, rope = layer.qk_norm, layer.qkv_bias, self._ropes[index]
        packed, heads = Packed(qkv, delta, bias), (self.config.num_heads, self.config.head_dim)
        if self._plan.is_gated:
            assert scales is None
            qkv, delta, bias = split_heads_triton(packed, *heads), None, None
        if norm is not None and norm.dim() == 1:
            qkv = self._norm_all_heads(_Product(qkv, delta, scales), bias, norm)
            norm = bias = delta = scales = None
        q = rope_kv_write_triton(
            qkv,
            None if rope is None else rope.cos,
            None if rope is None else rope.sin,
            batch.positions,
            self.arena,
            self.layout,
            self._places[index],
            batch.slots,
            num_heads=self.config.num_heads,
            delta=delta,
            bias=bias,
            norm=norm,
            eps=self._plan.eps,
            scales=scales,
            pairs=None if rope is None else rope.pairs,
        )
        if self._plan.growth is not None:
            q *= self._plan.growth.factors(batch.positions).to(q.dtype)[:, None, None]
        attended = self._attend(batch, self._places[index], q, layer.o)
        if self._plan.is_gated:
            gate_heads_triton(attended.given, packed, *heads)
        return attended

    def _mix(self, batch: GpuBatch, index: int, layer: LayerWeights, x: Activation) -> Activation:
        base, delta, scales = self._linear_with_lora(batch, index, DELTA, x, layer.qkv)
        assert self.delta and layer.delta and batch.states and scales is None
        given = Projected(base, delta)
        return Activation(self.delta.mix(batch.states, given, layer.delta, self._places[index]))

    def _norm_all_heads(
        self, qkv: _Product, bias: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return q, k and v [T, (H + 2 K) D] with q as one row normed, and k."""
        total = _total(qkv)
        if bias is not None:
            total = total + bias
        q_size, kv_size = self.config.q_size, self.config.kv_size
        *both, v = torch.split(total, [q_size, kv_size, kv_size], dim=1)
        weights = torch.split(weight, [q_size, kv_size])
        eps = self._plan.eps
        q, k = (
            norm_triton(x.contiguous(), own, eps)[0].given
            for x, own in zip(both, weights, strict=True)
        )
        return torch.cat((q, k, v), dim=1)

    def _attend(self, batch: GpuBatch, index: int, q: torch.Tensor, reader: Matrix) -> Activation:
        """Attend; decodes alone are quantised on the way, if `reader` is in FP8."""
        window = self.config.window(index)
        out = None
        if batch.blocks is not None:
            blocks = batch.blocks
            out = attention_prefill_triton(
                q,
                self.arena,
                self.layout,
                index,
                blocks.query_start,
                blocks.context_lens,
                blocks.page_tables,
                self._scale,
                max_new=blocks.size,
                window=window,
            )
        args = (
            q,
            self.arena,
            self.layout,
            index,
            batch.query_start,
            batch.context_lens,
            batch.page_tables,
            self._scale,
        )
        # Decodes among prefill chunks take the prefill kernel: one launch, and they are few.
        if batch.max_new > 1 and batch.blocks is None:
            out = attention_prefill_triton(*args, max_new=batch.max_new, window=window)
            return Activation(out.flatten(1))
        rows: Fp8Rows | None = None
        fixed: torch.Tensor | None = None
        if isinstance(reader, Fp8Matrix) and out is None:
            rows, fixed = empty_rows(q.flatten(1)), reader.input_scale
        out = attention_decode_triton(
            *args, workspace=batch.workspace, window=window, out=out, quantized=rows, fixed=fixed
        )
        return Activation(out.flatten(1), rows)

    def _residual_linear(
        self,
        batch: GpuBatch,
        index: int,
        projection: Projection,
        x: Activation,
        linear: _Linear,
        residual: torch.Tensor,
        norm: _Norm | None,
    ) -> tuple[Activation, torch.Tensor]:
        """Return (the sum's norm, the sum) of the residual, x W^T + b and the adapters' part of it.

        In a long pass a product that is not in FP8 adds itself to the residual, in place: its
        blocks read that beside their multiplications, and the norm has two tensors less to move.

        norm  None: nobody reads the sum's norm
        """
        weight, bias, out_norm = linear
        is_long = x.num_rows >= _LONG and bias is None and batch.extras is None
        is_long = is_long and out_norm is None
        onto = residual if is_long and isinstance(weight, torch.Tensor) else None
        product = self._linear_with_lora(batch, index, (projection,), x, weight, bias, onto)
        if out_norm is not None:
            product = _Product(norm_triton(_total(product), out_norm, self._plan.eps)[0].given)
        return self._add(batch, product, None if onto is not None else residual, norm)

    def _add(
        self,
        batch: GpuBatch,
        product: _Product,
        residual: torch.Tensor | None,
        norm: _Norm | None,
    ) -> tuple[Activation, torch.Tensor]:
        """Return (the sum's norm, the sum) of a product and the residual.

        residual  None: the product has been added to it
        norm      None: nobody reads the sum's norm
        """
        if norm is None or norm[0] is None or self._plan.is_centred:
            total = _total(product)
            total = total if residual is None else residual + total
            return Activation(total) if norm is None else self._normed(batch, total, norm), total
        out, delta, scales = product
        eps, readers = self._plan.eps, _readers(batch, norm[1])
        if residual is not None:
            return norm_triton(
                out, norm[0], eps, residual=residual, delta=delta, scales=scales, **readers
            )
        if delta is not None:
            return norm_triton(delta, norm[0], eps, residual=out, **readers)
        return norm_triton(out, norm[0], eps, **readers)

    def _normed(self, batch: GpuBatch, x: torch.Tensor, norm: _Norm) -> Activation:
        """Return the norm of x [T, E], for the matrix that multiplies it."""
        weight, reader = norm
        if weight is None:
            return Activation(x) if reader is None else _quantized(x, reader)
        if self._plan.is_centred:
            x = x - x.mean(-1, keepdim=True)
        return norm_triton(x, weight, self._plan.eps, **_readers(batch, reader))[0]

    def _run_experts(
        self, batch: GpuBatch, index: int, layer: LayerWeights, x: torch.Tensor
    ) -> torch.Tensor:
        """x [T, E] -> what experts make of it, and the MLP beside them, [T, E]"""
        assert layer.experts is not None and self._plan.experts is not None
        shared = None
        if layer.experts.shared_gate is not None:
            inner = self._mlp(batch, index, layer, Activation(x))
            product = self._linear_with_lora(batch, index, DOWN, inner, layer.down)
            shared = Shared(product.base, product.delta)
        return expert_mlp_triton(
            x, layer.experts, self._plan.experts, slots=batch.slots, shared=shared
        )

    def _mlp(self, batch: GpuBatch, index: int, layer: LayerWeights, x: Activation) -> Activation:
        """Return the input of the down projection, [T, I]."""
        table, plan = batch.table, None if batch.is_mlp_plain else batch.plan
        has_more = batch.extras is not None or layer.gate_up_bias is not None
        is_gelu = self._plan.is_gelu
        weight, may_fuse = layer.gate_up, batch.may_fuse and not has_more and not is_gelu
        if x.num_rows >= _FUSED and may_fuse and can_fuse(weight, x):
            h = None if plan is None else self._shrink(batch, index, GATE_UP, x.given)
            given = x.fp8 or x.given
            inner = gate_up_silu_triton(
                given, weight, h=h, arena=self._tiles, table=table, plan=plan, layer=index
            )
            return _quantized(inner, layer.down)
        if table is not None and plan is not None and plan.block_t > RANK_BLOCK:
            # Many tokens: a delta of [T, 2I] would cost more to write and read than it hides.
            side = self._side_stream(batch, GATE_UP, weight)
            with torch.cuda.stream(side):
                h = self._shrink(batch, index, GATE_UP, x.given)
            gate_up, scales = self._product(batch, x, weight, layer.gate_up_bias)
            self._join(side)
            self._adjust(batch, index, GATE_UP, gate_up)
            inner = lora_silu_mul_triton(
                gate_up, h, self._tiles, table, plan, index, scales, is_gelu=is_gelu
            )
            return _quantized(inner, layer.down)
        gate_up, delta, scales = self._linear_with_lora(
            batch, index, GATE_UP, x, weight, layer.gate_up_bias
        )
        if isinstance(layer.down, Fp8Matrix):
            finished = None if batch.workspace is None else batch.workspace.finished
            if finished is not None and x.num_rows > min(_SHORT, len(finished)):
                finished = None
            return Activation(
                *silu_mul_fp8_triton(
                    gate_up,
                    delta,
                    scales,
                    reader=layer.down,
                    is_plain=plan is not None,
                    is_gelu=is_gelu,
                    finished=finished,
                )
            )
        if scales is not None:
            apply_scales_triton(gate_up, scales)
        return Activation(silu_mul_triton(gate_up, delta, is_gelu))

    def _linear_with_lora(
        self,
        batch: GpuBatch,
        index: int,
        projections: tuple[Projection, ...],
        x: Activation,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        onto: torch.Tensor | None = None,
        later: torch.Tensor | None = None,
    ) -> _Product:
        """Compute x W^T + b and the adapters' part of it, side by side.

        Whoever reads the product adds the two: adding into it would have to wait for it.

        onto   given, the product is added to it in place; there is no bias then
        later  the base's bias where whoever reads the product adds that as well: gains meet it
        """
        is_plain = batch.is_mlp_plain and projections[0] >= Projection.GATE
        if batch.table is None or batch.plan is None or is_plain:
            base, scales = self._product(batch, x, weight, bias, onto)
            return _Product(base, None, scales)
        side = self._side_stream(batch, projections, weight)
        with torch.cuda.stream(side):
            delta = torch.empty(
                x.num_rows, weight.shape[0], dtype=x.given.dtype, device=x.given.device
            )
            for own, low in self._together(index, projections):
                lora_expand_triton(
                    self._shrink(batch, index, own, x.given),
                    self._tiles,
                    batch.table,
                    batch.plan,
                    index,
                    own,
                    delta[:, low:],
                    self._offsets(index, own),
                    add=False,
                )
        base, scales = self._product(batch, x, weight, bias, onto, is_shared=True)
        self._join(side)
        self._adjust(batch, index, projections, base, later)
        return _Product(base, delta, scales)

    def _product(
        self,
        batch: GpuBatch,
        x: Activation,
        weight: Matrix,
        bias: torch.Tensor | None,
        onto: torch.Tensor | None = None,
        is_shared: bool = False,
    ) -> tuple[torch.Tensor, Scales | None]:
        """Return (x W^T + b, the scales that it lacks).

        An FP8 product that a bias is added to, or that adapters adjust, gets its scales here.

        is_shared  whether adapters' kernels are to run beside it
        """
        if isinstance(weight, Fp8Matrix):
            assert x.fp8 is not None
            product, scales = fp8_product(
                x.fp8, weight, self.weights.embedding.dtype, is_shared=is_shared
            )
            if bias is None and batch.extras is None:
                return product, scales
            return apply_scales_triton(product, scales, bias), None
        if isinstance(weight, Int4Matrix):
            return int4_linear(x.given, weight, bias), None
        if onto is not None:
            return onto.addmm_(x.given, weight.t()), None
        # In bf16 the library's products leave more room than those for few rows do.
        if bias is not None or is_shared:
            return functional.linear(x.given, weight, bias), None
        return self._linear(x.given, weight), None

    def _adjust(
        self,
        batch: GpuBatch,
        index: int,
        projections: tuple[Projection, ...],
        y: torch.Tensor,
        later: torch.Tensor | None = None,
    ) -> None:
        """Apply the adapters' gains and shifts to the base's product y, in place."""
        if batch.extras is None:
            return
        for own, low in self._together(index, projections):
            bounds, bias = self._offsets(index, own), None if later is None else later[low:]
            lora_adjust_triton(y[:, low:], self.arena, batch.extras, index, own, bounds, bias)

    def _shrink(
        self, batch: GpuBatch, index: int, projections: tuple[Projection, ...], x: torch.Tensor
    ) -> torch.Tensor:
        assert batch.table is not None and batch.plan is not None
        return lora_shrink_triton(x, self._tiles, batch.table, batch.plan, index, projections)

    def _together(
        self, index: int, projections: tuple[Projection, ...]
    ) -> list[tuple[tuple[Projection, ...], int]]:
        """Return the projections of each launch, and the output's column where they begin."""
        bounds = self._offsets(index, projections)
        firsts = range(0, len(projections), _TOGETHER)
        return [(projections[first : first + _TOGETHER], bounds[first]) for first in firsts]

    def _offsets(self, index: int, projections: tuple[Projection, ...]) -> tuple[int, ...]:
        widths = (self._widths[index][p][1] for p in projections)
        return tuple(itertools.accumulate(widths, initial=0))

    def _side_stream(
        self, batch: GpuBatch, projections: tuple[Projection, ...], weight: Matrix
    ) -> torch.cuda.Stream | None:
        """Return the stream for adapters' kernels beside the main stream, until `_join`.

        Usually they run before the product: its blocks hold their processors from end to end, and
        short kernels would wait. For gate and up in a decode with many adapters they run beside
        it: that product leaves enough processors and bandwidth for the shrink, but not if it is in
        FP8, which takes half as long. None: adapters' kernels take turns with the products.
        """
        plan, side = batch.plan, self._before
        if batch.is_in_line or plan is None or side is None:
            return None
        is_decode = plan.block_t <= RANK_BLOCK and plan.chunks.shape[0] > MANY_CHUNKS
        is_fp8 = isinstance(weight, Fp8Matrix)
        if is_decode and projections == GATE_UP and not is_fp8 and self._after is not None:
            side = self._after
        side.wait_stream(torch.cuda.current_stream(self.device))
        return side

    def _join(self, side: torch.cuda.Stream | None) -> None:
        if side is not None:
            torch.cuda.current_stream(self.device).wait_stream(side)


def _total(product: _Product) -> torch.Tensor:
    """Return a linear's whole output [T, N]."""
    total = product.base
    if product.scales is not None:
        total = apply_scales_triton(total, product.scales)
    return total if product.delta is None else total + product.delta


def _readers(batch: GpuBatch, weight: Matrix | None) -> dict[str, Any]:
    """Return `norm_triton`'s arguments for the matrix and the adapters that read its output."""
    if not isinstance(weight, Fp8Matrix):
        return {}
    return {"reader": weight, "is_plain": batch.plan is not None}


def _quantized(x: torch.Tensor, weight: Matrix) -> Activation:
    """Return x [T, K], and its numbers if the matrix that multiplies it is in FP8."""
    if isinstance(weight, Fp8Matrix):
        return Activation(x, quantize_rows_triton(x, weight.input_scale))
    return Activation(x)
