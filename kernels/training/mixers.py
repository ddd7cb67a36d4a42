"""Mixers of training beside plain attention; see `kernels.training.sublayers.Mixer`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.delta import DeltaShape, DeltaState, DeltaWeights, delta_net, groups_of
from kernels.gates import join_gates, split_gates
from kernels.rms_norm import rms_norm_ref
from kernels.training.attention import Attended, Options, attention_by_row
from kernels.training.rope import rotate_torch
from kernels.training.segments import Rows
from kernels.training.sublayers import Heads


@dataclass(frozen=True, slots=True)
class _Gated:
    """share  [T, H D]: the gates' sigmoids"""

    qkv: torch.Tensor
    share: torch.Tensor
    attended: Attended

    @property
    def out(self) -> torch.Tensor:
        return self.attended.out.flatten(1) * self.share


@dataclass(frozen=True, slots=True)
class GatedHeads:
    """`Mixer` of attention whose output is multiplied by gates' sigmoids."""

    heads: Heads

    def attend(self, packed: torch.Tensor, rows: Rows) -> _Gated:
        qkv, gate = split_gates(packed, self.heads.num_heads, self.heads.dim)
        return _Gated(qkv, gate.sigmoid(), self.heads.attend(qkv, rows))

    def backward(
        self, packed: torch.Tensor, mixed: _Gated, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        share = mixed.share
        d_gate = dy * mixed.out * (1 - share)
        d_qkv = self.heads.backward(mixed.qkv, mixed.attended, dy * share, rows)
        return join_gates(d_qkv, d_gate, self.heads.num_heads, self.heads.dim)


@dataclass(frozen=True, slots=True)
class _Graph:
    """packed and out are of a graph of autograd's own."""

    packed: torch.Tensor
    graph: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        return self.graph.detach()


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """`Mixer` of a gated delta net, in which each row begins with an empty state."""

    shape: DeltaShape
    weights: DeltaWeights
    eps: float

    def attend(self, packed: torch.Tensor, rows: Rows) -> _Graph:
        with torch.enable_grad():
            packed = packed.detach().requires_grad_()
            parts, order = [], []
            for members, places in groups_of(rows.bounds, packed.device):
                state = DeltaState.zero(self.shape, len(members), packed.device)
                out, _ = delta_net(packed[places], state, self.weights, self.shape, self.eps)
                parts.append(out.flatten(0, 1))
                order.append(places.flatten())
            return _Graph(packed, torch.cat(parts)[torch.cat(order).argsort()])

    def backward(
        self, packed: torch.Tensor, mixed: _Graph, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(mixed.graph, mixed.packed, dy)
        return gradient


@dataclass(frozen=True, slots=True)
class ShapedHeads:
    """`Mixer` of attention whose values have a norm, too; on a CPU, by autograd.

    has_v  whether `packed` has values; else they are the keys before their norm
    """

    heads: Heads
    has_v: bool

    def attend(self, packed: torch.Tensor, rows: Rows) -> _Graph:
        heads = self.heads
        assert heads.qk_norm is not None and heads.cos is not None and heads.sin is not None
        assert heads.scale is not None
        with torch.enable_grad():
            packed = packed.detach().requires_grad_()
            x = packed.view(len(packed), -1, heads.dim)
            q, k = x[:, : heads.num_heads], x[:, heads.num_heads :][:, : heads.num_kv_heads]
            v = x[:, heads.num_heads + heads.num_kv_heads :] if self.has_v else k
            q, k, v = (
                rms_norm_ref(part, weight, heads.eps)
                for part, weight in zip((q, k, v), heads.qk_norm, strict=True)
            )
            q, k = (
                rotate_torch(part, heads.cos, heads.sin, rows.positions, back=False)
                for part in (q, k)
            )
            out = attention_by_row(q, k, v, Options(rows, heads.scale, heads.window))
            return _Graph(packed, out.flatten(1))

    def backward(
        self, packed: torch.Tensor, mixed: _Graph, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(mixed.graph, mixed.packed, dy)
        return gradient
