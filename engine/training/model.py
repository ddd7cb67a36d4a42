"""The decoder over packed rows of many runs, with gradients to their adapters alone.

The base's weights are those that serving holds (`engine.model.weights`), never copied and never
changed. A layer keeps what its linears need again in the backward pass, or, where memory is short,
its halves' inputs alone, from which most is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.rope import LayerRopes
from engine.model.weights import LayerWeights, Weights
from engine.training.packer import MicroBatch
from kernels.experts import ExpertWeights, expert_mlp
from kernels.training import (
    DeltaHeads,
    GatedHeads,
    Heads,
    LoraSite,
    LoraWeight,
    Mixer,
    Norm,
    Pools,
    ShapedHeads,
    SharedKeys,
    answer_loss,
    attention_sublayer,
    mlp_sublayer,
    rms_norm,
)


class _Shared(NamedTuple):
    """The tensors that layers of a pass share.

    inputs  their own inputs [T, L, P]; None: they have none
    keys    layer -> its keys and values, which later layers read
    """

    inputs: torch.Tensor | None
    keys: dict[int, SharedKeys]


class TrainingModel:
    """One base and what runs through it.

    num_recomputed  of the layers, how many are computed again in the backward pass; the first ones
    between         called before each layer, forward and backward, in the caller's thread; it may
                    use the device, but nothing that is the pass's, and it raises nothing
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_recomputed: int = 0,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.num_recomputed, self.between = num_recomputed, between
        self._weights = weights
        device = weights.embedding.device
        what = config.plan.trained_on_a_cpu_alone
        if what and device.type != "cpu":
            raise UnsupportedModel(
                f"adapters of models with {what} are trained on a CPU alone: use one",
                param="device",
            )
        self._rope = LayerRopes(
            config.head_dims, config.plan.rotations, config.max_positions, device
        )

    @property
    def device(self) -> torch.device:
        return self._weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.embedding.dtype

    def backward(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        """Add every run's gradient to `pools.gradient`.

        -> [N]: the loss of each answer token, not weighted
        """
        # Each layer is a graph of its own, so that the backward pass, too, comes back here between
        # two of them: on a GPU autograd works through a graph in a thread of its own.
        passed: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden = self._embed(batch)
        shared = self._shared(batch, hidden)
        for index in range(self.config.num_layers):
            self._pause()
            taken = hidden.detach().requires_grad_()
            hidden = self._shaped(taken, index, batch, sites[index], pools, shared)
            passed.append((taken, hidden))
        self._pause()
        taken = hidden.detach().requires_grad_()
        total, losses = self._loss(taken, batch)
        (gradient,) = torch.autograd.grad(total, taken)
        while passed:
            self._pause()
            taken, hidden = passed.pop()
            (gradient,) = torch.autograd.grad(hidden, taken, gradient)
        return losses.detach()

    @torch.no_grad()
    def token_losses(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        """Return the loss of each answer token [N]; forward alone."""
        return self._loss(self._forward(batch, sites, pools), batch)[1]

    @torch.no_grad()
    def states(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        """Return the LM head's inputs before each answer token [N, E]; forward alone."""
        hidden = self._forward(batch, sites, pools)
        return self._norm(self._weights.norm).forward(hidden[batch.predicting])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., V], differentiable in the states."""
        logits = functional.linear(states.to(self.dtype), self._weights.lm_head)
        return self.config.plan.scaled(logits)

    def _forward(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        """-> [T, E], before the last norm"""
        hidden = self._embed(batch)
        shared = self._shared(batch, hidden)
        for index in range(self.config.num_layers):
            self._pause()
            hidden = self._shaped(hidden, index, batch, sites[index], pools, shared)
        return hidden

    def _pause(self) -> None:
        if self.between is not None:
            self.between()

    def _embed(self, batch: MicroBatch) -> torch.Tensor:
        self._rope.extend_to(batch.rows.longest)
        hidden = functional.embedding(batch.token_ids, self._weights.embedding)
        return self.config.plan.embedded(hidden)

    def _shared(self, batch: MicroBatch, hidden: torch.Tensor) -> _Shared:
        plan, per_layer = self.config.plan, self._weights.per_layer
        inputs = None
        if per_layer is not None:
            inputs = per_layer.inputs(batch.token_ids, hidden, plan.eps)
        owners = {shape.keys_of for shape in plan.shapes if shape.keys_of is not None}
        return _Shared(inputs, {owner: SharedKeys() for owner in owners})

    def _shaped(
        self,
        hidden: torch.Tensor,
        index: int,
        batch: MicroBatch,
        sites: Sequence[LoraSite],
        pools: Pools,
        shared: _Shared,
    ) -> torch.Tensor:
        """Return what a layer makes of hidden [T, E], with what it adds by its own input."""
        layer, eps = self._weights.layers[index], self.config.plan.eps
        out = self._layer(hidden, index, batch, sites, pools, shared)
        if layer.per_layer is not None and shared.inputs is not None:
            out = out + layer.per_layer.added(out, shared.inputs[:, index], eps)
        return out if layer.scale == 1.0 else out * layer.scale

    def _norm(self, weight: torch.Tensor | None) -> Norm:
        plan = self.config.plan
        return Norm(weight, plan.eps, plan.is_centred)

    def _layer(
        self,
        hidden: torch.Tensor,
        index: int,
        batch: MicroBatch,
        sites: Sequence[LoraSite],
        pools: Pools,
        shared: _Shared,
    ) -> torch.Tensor:
        """hidden [T, E] -> [T, E]"""
        layer, plan = self._weights.layers[index], self.config.plan
        keep, segments = index >= self.num_recomputed, batch.segments
        qkv, o, gate_up, down = sites
        attended = attention_sublayer(
            hidden,
            self._norm(layer.attention_norm),
            LoraWeight(layer.qkv, layer.qkv_bias, qkv),
            LoraWeight(layer.o, layer.o_bias, o),
            self._mixer(index, layer, shared),
            pools,
            segments,
            batch.rows,
            keep=keep,
            out_norm=self._norm(layer.attention_out_norm),
        )
        experts = layer.experts
        if experts is not None and experts.shared_gate is None:
            return attended + self._of_experts(attended, layer, experts, keep)
        both = mlp_sublayer(
            hidden if plan.is_parallel else attended,
            self._norm(layer.attention_norm if plan.is_parallel else layer.mlp_norm),
            LoraWeight(layer.gate_up, layer.gate_up_bias, gate_up),
            LoraWeight(layer.down, layer.down_bias, down),
            pools,
            segments,
            keep=keep,
            out_norm=self._norm(layer.mlp_out_norm),
            is_gelu=plan.is_gelu,
        )
        if experts is not None:
            share = self._share(attended, layer, experts)
            return attended.lerp(both, share) + self._of_experts(attended, layer, experts, keep)
        return attended + both - hidden if plan.is_parallel else both

    def _of_experts(
        self, hidden: torch.Tensor, layer: LayerWeights, experts: ExpertWeights, keep: bool
    ) -> torch.Tensor:
        """hidden [T, E] -> what experts, which have no adapters, make of its norm, by autograd"""
        shape = self.config.plan.experts
        assert shape is not None

        def through(hidden: torch.Tensor) -> torch.Tensor:
            return expert_mlp(self._mlp_norm(hidden, layer), experts, shape)

        if keep:
            return through(hidden)
        out: torch.Tensor = checkpoint(through, hidden, use_reentrant=False)
        return out

    def _share(
        self, hidden: torch.Tensor, layer: LayerWeights, experts: ExpertWeights
    ) -> torch.Tensor:
        """Return the share [T, 1] of the MLP that stands beside experts."""
        assert experts.shared_gate is not None
        return functional.linear(self._mlp_norm(hidden, layer), experts.shared_gate).sigmoid()

    def _mlp_norm(self, hidden: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        assert layer.mlp_norm is not None
        return rms_norm(hidden, layer.mlp_norm, self.config.plan.eps)

    def _mixer(self, index: int, layer: LayerWeights, shared: _Shared) -> Mixer:
        plan = self.config.plan
        if layer.delta is not None and plan.delta is not None:
            return DeltaHeads(plan.delta, layer.delta, plan.eps)
        heads = self._heads(index, layer)
        if plan.shapes:
            owner = plan.shapes[index].keys_of
            keys = shared.keys.get(index if owner is None else owner)
            return ShapedHeads(heads, plan.shapes[index].has_v, keys, owner is not None)
        return GatedHeads(heads) if plan.is_gated else heads

    def _heads(self, index: int, layer: LayerWeights) -> Heads:
        config, rope, growth = self.config, self._rope.layers[index], self.config.plan.growth
        shape = config.shape(index)
        return Heads(
            num_heads=config.num_heads,
            num_kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            pairs=None if rope is None else rope.pairs,
            window=config.window(index),
            scale=config.attention_scale,
            qk_norm=layer.qk_norm,
            eps=config.plan.eps,
            growth=None if growth is None else growth.factors,
            sinks=layer.sinks,
        )

    def _loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        # The head is linear and has no adapter: its factor can be the norm's.
        norm = self._norm(weights.norm * self.config.plan.logit_scale)
        return answer_loss(
            hidden, weights.lm_head, batch.predicting, batch.targets, batch.weights,
            norm=norm, reweigh=batch.reweigh, cap=self.config.plan.logit_cap,
        )  # fmt: skip
