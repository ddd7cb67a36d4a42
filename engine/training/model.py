"""The decoder over packed rows of many runs, with gradients to their adapters alone.

The base's weights are those that serving holds (`engine.model.weights`), never copied and never
changed. A layer keeps what its linears need again in the backward pass, or, where memory is short,
its input alone, from which it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.model.config import ModelConfig
from engine.model.rope import RopeTables
from engine.model.weights import LayerWeights, Weights
from engine.training.packer import MicroBatch
from kernels.training import (
    LoraSite,
    Norm,
    Pools,
    SiluMul,
    answer_loss,
    attention,
    lora_linear,
    rms_norm,
    rope,
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
            inputs = hidden, index, batch, sites[index], pools
            if index < self.num_recomputed and hidden.requires_grad:
                hidden = checkpoint(
                    self._layer, *inputs, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = self._layer(*inputs)
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
        layer, eps, segments = self._weights.layers[index], self.config.rms_norm_eps, batch.segments
        qkv_site, o_site, gate_up_site, down_site = sites
        qkv = lora_linear(
            hidden, layer.qkv, layer.qkv_bias, qkv_site, pools, segments,
            before=Norm(layer.input_norm, eps),
        )  # fmt: skip
        attended = self._attend(qkv, layer, index, batch)
        hidden = lora_linear(
            attended, layer.o, layer.o_bias, o_site, pools, segments, residual=hidden
        )
        gate_up = lora_linear(
            hidden, layer.gate_up, layer.gate_up_bias, gate_up_site, pools, segments,
            before=Norm(layer.post_norm, eps),
        )  # fmt: skip
        return lora_linear(
            gate_up, layer.down, layer.down_bias, down_site, pools, segments,
            before=SiluMul(), residual=hidden,
        )  # fmt: skip

    def _attend(
        self, qkv: torch.Tensor, layer: LayerWeights, index: int, batch: MicroBatch
    ) -> torch.Tensor:
        """qkv [T, (H + 2 K) D] -> [T, H D]"""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        groups = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(heads, groups, dim=1)
        if layer.qk_norm is not None:
            q = rms_norm(q, layer.qk_norm[0], config.rms_norm_eps)
            k = rms_norm(k, layer.qk_norm[1], config.rms_norm_eps)
        cos, sin, positions = self._rope.cos, self._rope.sin, batch.rows.positions
        q, k = rope(q, cos, sin, positions), rope(k, cos, sin, positions)
        return attention(q, k, v, batch.rows, window=config.window(index)).flatten(1)

    def _loss(self, hidden: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        return answer_loss(
            hidden, weights.lm_head, batch.predicting, batch.targets, batch.weights,
            norm=Norm(weights.norm, self.config.rms_norm_eps),
        )  # fmt: skip
