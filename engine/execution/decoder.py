"""The decoder of all families, over ragged batches, paged KV and tiled adapters.

Tensors are named as in Hugging Face's LlamaForCausalLM and its relatives, which are the oracle. A
family is Llama but for its plan and what its weights hold. The model does not know of requests,
ranks or pages: an `Attention` finds the step's KV, an `Adapters` adds what the rows' adapters
contribute.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional

from engine.execution.batch import Batch
from engine.model.config import ModelConfig
from engine.model.delta_states import DeltaStates
from engine.model.plan import Plan
from engine.model.rope import RopeTables
from engine.model.weights import LayerWeights, Matrix, Weights, dense
from kernels import (
    LoraBatch,
    LoraExtras,
    PageLayout,
    Projection,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from kernels.experts import expert_mlp
from kernels.experts.lora import ExpertLora
from kernels.fp8 import Fp8Matrix, quantize_rows_ref
from kernels.gates import split_gates
from kernels.lora.adjust import lora_adjust
from kernels.lora.apply import lora_expand, lora_shrink
from kernels.lora.vocab import lora_embed, lora_head
from kernels.rms_norm import rms_norm_ref

QKV = (Projection.Q, Projection.K, Projection.V)
DELTA = (*QKV, Projection.DECAY)
O = (Projection.O,)  # noqa: E741
GATE_UP = (Projection.GATE, Projection.UP)
DOWN = (Projection.DOWN,)

# Batch size that oneDNN packs weights for: measured best for 1 to 256 rows on AVX-512.
_PACKED_FOR_ROWS = 16


class Adapters(Protocol):
    """One step's adapters.

    experts  those of routed experts; None: the step has none
    """

    experts: ExpertLora | None

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        layer: int,
        projections: tuple[int, ...],
        out_offsets: tuple[int, ...],
    ) -> None:
        """Add to y [T, sum of out] what each row's adapter makes of x [T, in], in place."""


class Attention(Protocol):
    """One step's attention."""

    def attend(
        self, heads: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to their pages, attend.

        heads  [T, H + 2 K, D] queries, keys and values as projected
        layer  which of those with keys and values
        sinks  [H], see `kernels.attention`
        -> [T, H * D]
        """


class PagedAttention:
    """`Attention` by the kernels.

    ropes  the tables of each layer with attention
    """

    def __init__(
        self,
        batch: Batch,
        ropes: Sequence[RopeTables | None],
        arena: torch.Tensor,
        layout: PageLayout,
        config: ModelConfig,
    ) -> None:
        self._batch, self._ropes, self._config = batch, ropes, config
        self._arena, self._layout = arena, layout

    def attend(
        self, heads: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch, layout = self._batch, self._layout
        groups = [self._config.num_heads, layout.num_kv_heads, layout.num_kv_heads]
        q, k, v = torch.split(heads, groups, dim=1)
        rope, growth = self._ropes[layer], self._config.plan.growth
        if rope is not None and rope.pairs is not None:
            order = rope.pairs.order(layout.head_dim, heads.device)
            q, k = q[..., order], k[..., order]
        cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
        q = rope_kv_write(
            q, k, v, cos, sin, batch.positions, self._arena, layout, layer, batch.slots
        )
        if growth is not None:
            q = q * growth.factors(batch.positions).to(q.dtype)[:, None, None]
        out = paged_attention(
            q,
            self._arena,
            layout,
            layer,
            batch.query_start,
            batch.context_lens,
            batch.page_tables,
            self._config.attention_scale,
            self._config.window(layer),
            sinks=sinks,
        )
        return out.reshape(len(heads), -1)


class TiledAdapters:
    """`Adapters` by the kernels, over tiles where they lie."""

    def __init__(self, lora: LoraBatch, arena: torch.Tensor) -> None:
        self._lora, self._arena = lora, arena
        self.experts: ExpertLora | None = None

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        layer: int,
        projections: tuple[int, ...],
        out_offsets: tuple[int, ...],
    ) -> None:
        h = lora_shrink(x, self._arena, self._lora, layer, projections)
        lora_expand(h, self._arena, self._lora, layer, projections, y, out_offsets)


class ExtendedAdapters:
    """`Adapters` of a step in which some have more than tiles (docs/memory.md).

    A projection's product is adjusted before anything is added to it.
    """

    def __init__(self, tiled: Adapters, extras: LoraExtras, arena: torch.Tensor) -> None:
        self._tiled, self._extras, self._arena = tiled, extras, arena
        self.experts = tiled.experts

    def add(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        layer: int,
        projections: tuple[int, ...],
        out_offsets: tuple[int, ...],
    ) -> None:
        lora_adjust(y, self._arena, self._extras, layer, projections, out_offsets)
        self._tiled.add(x, y, layer, projections, out_offsets)

    def embed(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Change the embeddings [T, E] of the rows whose adapters do, in place."""
        lora_embed(hidden, token_ids, self._arena, self._extras)

    def head(self, x: torch.Tensor, logits: torch.Tensor, extras: LoraExtras | None = None) -> None:
        """Add to the logits [N, V] of the sampling rows what adapters make of x [N, E].

        extras  of other rows, given for them
        """
        lora_head(logits, x, self._arena, extras or self._extras)


class Linear:
    """x [T, in] -> x W^T + b [T, out].

    On a CPU in fp32 the weight is kept as oneDNN packs it: MKL, torch's default there, takes two
    to three times as long on processors that are not Intel's.

    A weight in FP8 is kept as `dtype`, and x is rounded as a GPU quantises it: the arithmetic of
    the card's products, but for the order of sums.

    may_pack  False: never, so that there is no second copy of a weight that somebody else holds
    """

    def __init__(
        self,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        *,
        may_pack: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.bias = bias
        self._fp8 = weight if isinstance(weight, Fp8Matrix) else None
        weight = dense(weight, dtype)
        self._is_packed = (
            may_pack
            and weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch._C._has_mkldnn
        )
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
            if self._is_packed
            else weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._fp8 is not None:
            x = quantize_rows_ref(x, self._fp8.input_scale).dense().to(x.dtype)
        if self._is_packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self.bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self.bias)

    def weight(self) -> torch.Tensor:
        """W [out, in] as it was given; a copy, if it is kept otherwise."""
        return self._weight.to_dense() if self._is_packed else self._weight


def add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, E] -> (the sum's norm, the sum); without a weight, the sum twice."""
    if weight is not None and residual is not None and not plan.is_centred:
        return add_rms_norm(x, residual, weight, plan.eps)
    total = x if residual is None else x + residual
    if weight is None:
        return total, total
    centred = total - total.mean(-1, keepdim=True) if plan.is_centred else total
    return rms_norm(centred, weight, plan.eps), total


class DecoderLayer:
    """Attention, or a gated delta net, and MLP or experts of one layer, between their norms."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: LayerWeights,
        may_pack: bool = True,
        linear: type[Linear] = Linear,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._config, self._index, self._weights = config, index, weights
        # Which of the gated delta nets it has, or which of the layers with attention it is.
        before = sum(layer < index for layer in config.plan.delta_layers)
        self._place = index - before if weights.delta is None else before
        self._shape = config.shape(index)
        make = functools.partial(linear, may_pack=may_pack, dtype=dtype)
        self._qkv = make(weights.qkv, weights.qkv_bias)
        self._o = make(weights.o, weights.o_bias)
        self._linears = {"qkv": self._qkv, "o": self._o}
        experts = weights.experts
        if experts is None or experts.shared_gate is not None:
            self._gate_up = make(weights.gate_up, weights.gate_up_bias)
            self._down = make(weights.down, weights.down_bias)
            self._linears |= {"gate_up": self._gate_up, "down": self._down}
        self._qk_norm = weights.qk_norm  # [(H + K) D] of all heads, or [H + K, D]
        if weights.qk_norm is not None and weights.qk_norm.dim() == 2:
            numbers = config.num_heads, self._shape.kv_heads, self._shape.kv_heads
            each = zip(weights.qk_norm, numbers, strict=False)
            self._qk_norm = torch.cat([norm.expand(number, -1) for norm, number in each])
        widths = config.widths(index)
        inner = widths[Projection.DOWN][0]
        parts = QKV if weights.delta is None else DELTA
        self._qkv_parts = tuple(part for part in parts if widths[part][1])
        self._qkv_offsets = (0, *accumulate(widths[part][1] for part in self._qkv_parts))
        self._o_offsets = self._down_offsets = (0, config.hidden_size)
        self._gate_up_offsets = (0, inner, 2 * inner)

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        attention: Attention,
        adapters: Adapters | None,
        states: DeltaStates | None = None,
        taken: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, residual [T, E] -> the layer's own output and the sum before it, [T, E] each.

        taken  [T, P], the layer's own input, see `PerLayerGate`
        """
        plan, weights = self._config.plan, self._weights
        x, residual = add_norm(hidden, residual, weights.attention_norm, plan)
        out = self._mix(x, attention, adapters, states)
        if weights.attention_out_norm is not None:
            out = rms_norm(out, weights.attention_out_norm, plan.eps)
        if plan.is_parallel:
            return out + self._mlp(x, adapters), residual
        x, residual = add_norm(out, residual, weights.mlp_norm, plan)
        out = self._mlp(x, adapters)
        if weights.mlp_out_norm is not None:
            out = rms_norm(out, weights.mlp_out_norm, plan.eps)
        if weights.per_layer is not None and taken is not None:
            residual = out + residual
            out = weights.per_layer.added(residual, taken, plan.eps)
        if weights.scale != 1.0:
            return out * weights.scale, residual * weights.scale
        return out, residual

    def _mix(
        self,
        x: torch.Tensor,
        attention: Attention,
        adapters: Adapters | None,
        states: DeltaStates | None,
    ) -> torch.Tensor:
        index, delta = self._index, self._weights.delta
        qkv = self._qkv(x)
        if adapters is not None:
            adapters.add(x, qkv, index, self._qkv_parts, self._qkv_offsets)
        if delta is None:
            mixed = self._attend(qkv, attention)
        else:
            assert states is not None
            mixed = states.mix(qkv, delta, self._place)
        out = self._o(mixed)
        if adapters is not None:
            adapters.add(mixed, out, index, O, self._o_offsets)
        return out

    def _attend(self, qkv: torch.Tensor, attention: Attention) -> torch.Tensor:
        config, gate = self._config, None
        if config.plan.is_gated:
            qkv, gate = split_gates(qkv, config.num_heads, config.head_dim)
        heads = qkv.view(len(qkv), -1, self._shape.head_dim)
        if not self._shape.has_v and self._shape.keys_of is None:
            heads = torch.cat((heads, heads[:, config.num_heads :]), dim=1)
        if self._qk_norm is not None:
            self._norm_heads(heads, self._qk_norm)
        attended = attention.attend(heads, self._place, self._weights.sinks)
        return attended if gate is None else attended * gate.sigmoid()

    def _norm_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> None:
        """Norm q and k of heads [T, H + 2 K, D], in place; v, too, if there is a weight for it."""
        config, eps = self._config, self._config.plan.eps
        if weight.dim() == 2:
            normed = heads[:, : len(weight)]
            normed.copy_(rms_norm_ref(normed, weight, eps))
            return
        rotary = heads[:, : config.num_heads + config.num_kv_heads]
        parts = torch.split(rotary, [config.num_heads, config.num_kv_heads], dim=1)
        weights = torch.split(weight, [config.q_size, config.kv_size])
        for part, own in zip(parts, weights, strict=True):
            part.copy_(rms_norm_ref(part.flatten(1), own, eps).view(part.shape))

    def _mlp(self, x: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        experts, shape = self._weights.experts, self._config.plan.experts
        if experts is None or shape is None:
            return self._dense(x, adapters)
        routed = None if adapters is None else adapters.experts
        add = None if routed is None else functools.partial(self._add_to_expert, routed)
        out = expert_mlp(x, experts, shape, add)
        if experts.shared_gate is not None:
            share = functional.linear(x, experts.shared_gate).sigmoid()
            out = out + share * self._dense(x, adapters)
        return out

    def _add_to_expert(
        self,
        routed: ExpertLora,
        tokens: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        expert: int,
        is_down: bool,
    ) -> None:
        parts, width = (DOWN, y.shape[1]) if is_down else (GATE_UP, y.shape[1] // 2)
        offsets = (0, *accumulate(width for _ in parts))
        routed.add(tokens, x, y, self._index, expert, parts, offsets)

    def _dense(self, x: torch.Tensor, adapters: Adapters | None) -> torch.Tensor:
        index = self._index
        gate_up = self._gate_up(x)
        if adapters is not None:
            adapters.add(x, gate_up, index, GATE_UP, self._gate_up_offsets)
        inner = silu_mul(gate_up, self._config.plan.is_gelu)
        out = self._down(inner)
        if adapters is not None:
            adapters.add(inner, out, index, DOWN, self._down_offsets)
        return out

    @property
    def linears(self) -> dict[str, Linear]:
        return self._linears


class Decoder:
    """The whole model: token ids in, logits of the rows that sample out."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._plan = config.plan
        self._embedding, self._norm = weights.embedding, weights.norm
        self._per_layer = weights.per_layer
        self._layers = [
            DecoderLayer(config, i, layer, weights.may_pack, dtype=weights.embedding.dtype)
            for i, layer in enumerate(weights.layers)
        ]
        self._lm_head = Linear(weights.lm_head, may_pack=weights.may_pack)

    def __call__(
        self,
        batch: Batch,
        attention: Attention,
        adapters: Adapters | None,
        states: DeltaStates | None = None,
    ) -> torch.Tensor:
        """Write the step's KV and states, and return the logits [N, V] of `batch.sample_rows`."""
        hidden = functional.embedding(batch.token_ids, self._embedding)  # [T, E]
        extended = adapters if isinstance(adapters, ExtendedAdapters) else None
        if extended is not None:
            extended.embed(batch.token_ids, hidden)
        hidden = self._plan.embedded(hidden)
        residual: torch.Tensor | None = None
        inputs: Sequence[torch.Tensor | None] = [None] * len(self._layers)
        if self._per_layer is not None:
            inputs = self._per_layer.inputs(batch.token_ids, hidden, self._plan.eps).unbind(1)
        for layer, taken in zip(self._layers, inputs, strict=True):
            hidden, residual = layer(hidden, residual, attention, adapters, states, taken)
        assert residual is not None
        if batch.scores is not None:
            rows = batch.scores.rows
            x, _ = add_norm(hidden[rows], residual[rows], self._norm, self._plan)
            head = functools.partial(self._logits, extended)
            batch.scores.compute(x, head, len(self._embedding))
        if batch.pooled is not None:
            rows = batch.pooled.rows
            batch.pooled.x, _ = add_norm(hidden[rows], residual[rows], self._norm, self._plan)
        hidden, residual = hidden[batch.sample_rows], residual[batch.sample_rows]
        normed, _ = add_norm(hidden, residual, self._norm, self._plan)
        if batch.states is not None:
            batch.states.x = normed
        return self._logits(extended, normed)

    def _logits(
        self,
        extended: ExtendedAdapters | None,
        x: torch.Tensor,
        extras: LoraExtras | None = None,
    ) -> torch.Tensor:
        """x [N, E] -> [N, V]; `extras` are those of these rows, where they are not the sampling."""
        logits = self._lm_head(x)
        if extended is not None:
            extended.head(x, logits, extras)
        return self._plan.scaled(logits)

    def fused(self, layer: int, name: str) -> torch.Tensor:
        """Return a matrix of a layer as `engine.adapters.base_weights.FusedWeights` has it."""
        return self._layers[layer].linears[name].weight()

    def fused_bias(self, layer: int, name: str) -> torch.Tensor | None:
        """Its bias."""
        return self._layers[layer].linears[name].bias

    def embedding(self) -> torch.Tensor:
        """[V, E]"""
        return self._embedding

    def head_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, E] -> the base's logits [N, V]"""
        return self._plan.scaled(self._lm_head(x))

    def lm_head(self) -> torch.Tensor:
        """[V, E]"""
        return self._lm_head.weight()
