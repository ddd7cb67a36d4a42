"""Mixers of training beside plain attention; see `kernels.training.sublayers.Mixer`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.delta import DeltaShape, DeltaState, DeltaWeights, delta_net, groups_of
from kernels.gates import join_gates, split_gates
from kernels.training.attention import Attended
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
class _Delta:
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

    def attend(self, packed: torch.Tensor, rows: Rows) -> _Delta:
        with torch.enable_grad():
            packed = packed.detach().requires_grad_()
            parts, order = [], []
            for members, places in groups_of(rows.bounds, packed.device):
                state = DeltaState.zero(self.shape, len(members), packed.device)
                out, _ = delta_net(packed[places], state, self.weights, self.shape, self.eps)
                parts.append(out.flatten(0, 1))
                order.append(places.flatten())
            return _Delta(packed, torch.cat(parts)[torch.cat(order).argsort()])

    def backward(
        self, packed: torch.Tensor, mixed: _Delta, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(mixed.graph, mixed.packed, dy)
        return gradient
