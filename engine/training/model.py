"""The decoder over packed rows of many runs, with gradients to their adapters alone.

The base's weights are those that serving holds (`engine.model.weights`), never copied and never
changed. A layer keeps what its linears need again in the backward pass, or, where memory is short,
its halves' inputs alone, from which most is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.rope import RopeTables
from engine.model.weights import LayerWeights, Weights
from engine.training.packer import MicroBatch
from kernels.training import (
    Heads,
    LoraSite,
    LoraWeight,
    Norm,
    Pools,
    answer_loss,
    attention_sublayer,
    mlp_sublayer,
)


class TrainingModel:
    """One base and what runs through it.

    num_recomputed  of the layers, how many are computed again in the backward pass; the first ones
    """

    def __init__(self, config: ModelConfig, weights: Weights, num_recomputed: int = 0) -> None:
        self.config = config
        self.num_recomputed = num_recomputed
        self._weights = weights
        self._rope = RopeTables(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.max_positions,
            weights.embedding.device,
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

        -> [pieces] float64: each piece's part of its run's loss
        """
        hidden = self._embed(batch).requires_grad_()  # that autograd comes by each linear
        total, losses = self._loss(self._layers(hidden, batch, sites, pools), batch)
        torch.autograd.backward(total)
        return torch.segment_reduce(
            losses.detach().double() * batch.weights, "sum", lengths=batch.answer_counts
        )

    @torch.no_grad()
    def token_losses(
        self, batch: MicroBatch, sites: Sequence[Sequence[LoraSite]], pools: Pools
    ) -> torch.Tensor:
        """The loss of each answer token [N]; forward alone."""
        hidden = self._layers(self._embed(batch), batch, sites, pools)
        return self._loss(hidden, batch)[1]

    def _embed(self, batch: MicroBatch) -> torch.Tensor:
        self._rope.extend_to(batch.rows.longest)
        return functional.embedding(batch.token_ids, self._weights.embedding)

    def _layers(
        self,
        hidden: torch.Tensor,
        batch: MicroBatch,
        sites: Sequence[Sequence[LoraSite]],
        pools: Pools,
    ) -> torch.Tensor:
        for index in range(self.config.num_layers):
            hidden = self._layer(hidden, index, batch, sites[index], pools)
        return hidden

    def _layer(
        self,
        hidden: torch.Tensor,
        index: int,
        batch: MicroBatch,
        sites: Sequence[LoraSite],
        pools: Pools,
    ) -> torch.Tensor:
        """hidden [T, E] -> [T, E]"""
        layer, eps = self._weights.layers[index], self.config.rms_norm_eps
        keep, segments = index >= self.num_recomputed, batch.segments
        qkv, o, gate_up, down = sites
        hidden = attention_sublayer(
            hidden,
            Norm(layer.input_norm, eps),
            LoraWeight(layer.qkv, layer.qkv_bias, qkv),
            LoraWeight(layer.o, layer.o_bias, o),
            self._heads(index, layer),
            pools,
            segments,
            batch.rows,
            keep=keep,
        )
        return mlp_sublayer(
            hidden,
            Norm(layer.post_norm, eps),
            LoraWeight(layer.gate_up, layer.gate_up_bias, gate_up),
            LoraWeight(layer.down, layer.down_bias, down),
            pools,
            segments,
            keep=keep,
        )

    def _heads(self, index: int, layer: LayerWeights) -> Heads:
        config = self.config
        return Heads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            cos=self._rope.cos,
            sin=self._rope.sin,
            window=config.window(index),
            qk_norm=layer.qk_norm,
            eps=config.rms_norm_eps,
        )

    def _loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        return answer_loss(
            hidden, weights.lm_head, batch.predicting, batch.targets, batch.weights,
            norm=Norm(weights.norm, self.config.rms_norm_eps),
        )  # fmt: skip
