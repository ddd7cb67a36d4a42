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
    """packed, out and keys (and values, if they are shared) are of a graph of autograd's own."""

    packed: torch.Tensor
    graph: torch.Tensor
    keys: tuple[torch.Tensor, ...] = ()

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


@dataclass(slots=True)
class SharedKeys:
    """A layer's keys and values, which later layers read, in one pass.

    keys       set by the layer's forward pass
    gradients  what the readers' backward passes, which come first, have added
    """

    keys: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] = ()

    def add(self, gradients: tuple[torch.Tensor, ...]) -> None:
        if self.gradients:
            gradients = tuple(a + b for a, b in zip(self.gradients, gradients, strict=True))
        self.gradients = gradients


@dataclass(frozen=True, slots=True)
class ShapedHeads:
    """`Mixer` of attention whose values have a norm, too; on a CPU, by autograd.

    has_v      whether `packed` has values; else they are the keys before their norm
    shared     the keys and values that it reads, or that others read; None: nothing is shared
    is_reader  whether it reads them: `packed` has queries alone
    """

    heads: Heads
    has_v: bool
    shared: SharedKeys | None = None
    is_reader: bool = False

    def attend(self, packed: torch.Tensor, rows: Rows) -> _Graph:
        heads = self.heads
        assert heads.qk_norm is not None and heads.cos is not None and heads.sin is not None
        assert heads.scale is not None
        with torch.enable_grad():
            packed = packed.detach().requires_grad_()
            x = packed.view(len(packed), -1, heads.dim)
            parts = [x[:, : heads.num_heads]]
            if not self.is_reader:
                k = x[:, heads.num_heads :][:, : heads.num_kv_heads]
                v = x[:, heads.num_heads + heads.num_kv_heads :] if self.has_v else k
                parts += [k, v]
            normed = [
                rms_norm_ref(part, weight, heads.eps)
                for part, weight in zip(parts, heads.qk_norm, strict=True)
            ]
            for i, part in enumerate(normed[:2]):
                normed[i] = rotate_torch(part, heads.cos, heads.sin, rows.positions, back=False)
            keys = tuple(normed[1:])
            if self.shared is not None and self.is_reader:
                keys = self.shared.keys
            elif self.shared is not None:
                self.shared.keys = tuple(each.detach().requires_grad_() for each in keys)
            k, v = keys
            out = attention_by_row(normed[0], k, v, Options(rows, heads.scale, heads.window))
            return _Graph(packed, out.flatten(1), keys)

    def backward(
        self, packed: torch.Tensor, mixed: _Graph, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        shared = self.shared
        if shared is not None and self.is_reader:
            inputs = mixed.packed, *mixed.keys
            gradient, *rest = torch.autograd.grad(mixed.graph, inputs, dy)
            shared.add(tuple(rest))
            return gradient
        outputs, gradients = [mixed.graph], [dy]
        if shared is not None and shared.gradients:
            outputs, gradients = [*outputs, *mixed.keys], [*gradients, *shared.gradients]
        (gradient,) = torch.autograd.grad(outputs, mixed.packed, gradients)
        return gradient
