"""A decoder layer's two halves, each with one backward pass written by hand.

They compute what the single operations do, with less memory traffic: residuals are added where
another sum is stored anyway, gradients are written over what they were computed from, and what
gate_up's adapters add is never stored. With `keep=False` a half keeps its input and the vectors
between A and B alone, and computes the rest again in the backward pass, but for its last product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import linear

from kernels.fp8 import Fp8Matrix
from kernels.int4 import Int4Matrix
from kernels.rope import Pairs
from kernels.training.attention import Attended, Options, Three
from kernels.training.lora import (
    lora_backward_a,
    lora_backward_b,
    lora_forward,
    lora_shrink,
)
from kernels.training.lora_silu import lora_silu, lora_silu_backward
from kernels.training.norms import Norm, rms_norm_backward, rms_norm_forward
from kernels.training.pools import LoraSite, Pools
from kernels.training.rope import rotate
from kernels.training.segments import Rows, Segments

#: In place of a norm that a model does not have.
NO_NORM = Norm(None, 0.0)


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """A frozen weight [out, in], its bias [out], and the runs' adapters of it.

    A quantised weight is made dense for each product: gradients are those of the values served.
    """

    matrix: torch.Tensor | Fp8Matrix | Int4Matrix
    bias: torch.Tensor | None
    site: LoraSite

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> x W^T + b [T, out]"""
        return linear(x, self._dense(x.dtype), self.bias)

    def back(self, dy: torch.Tensor) -> torch.Tensor:
        """dy [T, out] -> dy W [T, in]"""
        return dy @ self._dense(dy.dtype)

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        matrix = self.matrix
        return matrix if isinstance(matrix, torch.Tensor) else matrix.dense(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of attention's heads in qkv [T, (H + 2 K) D].

    cos, sin    [M, D] float32 by position, the first half repeated; None: nothing is rotated
    pairs       which dimensions turn together; None: each with the one half a head further
    qk_norm     [2, D]: the RMSNorm's weights of every head's q and of its k; [(H + K) D]: those of
                q as one row, then of k
    growth      gives q's factors [T] of positions [T]; None: there are none
    sinks       [H], see `kernels.attention`; on a CPU alone
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    pairs: Pairs | None = None
    window: int | None = None
    scale: float | None = None
    qk_norm: torch.Tensor | None = None
    eps: float = 0.0
    growth: Callable[[torch.Tensor], torch.Tensor] | None = None
    sinks: torch.Tensor | None = None

    def split(self, qkv: torch.Tensor) -> Three:
        """Return views of q [T, H, D], k and v [T, K, D]."""
        heads = qkv.view(len(qkv), -1, self.dim)
        first, end = self.num_heads, self.num_heads + self.num_kv_heads
        return heads[:, :first], heads[:, first:end], heads[:, end:]

    def _both(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return a view of q and k [T, H + K, D]."""
        return qkv.view(len(qkv), -1, self.dim)[:, : self.num_heads + self.num_kv_heads]

    def _norms(self, q: torch.Tensor, k: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (weight, rows of it) of q and of k, views."""
        assert self.qk_norm is not None
        if self.qk_norm.dim() == 2:
            return [(self.qk_norm[0], q), (self.qk_norm[1], k)]
        weights = torch.split(
            self.qk_norm, [self.num_heads * self.dim, self.num_kv_heads * self.dim]
        )
        return [(w, x.flatten(1)) for w, x in zip(weights, (q, k), strict=True)]

    def _rotate(self, x: torch.Tensor, rows: Rows, back: bool) -> None:
        if self.cos is not None and self.sin is not None:
            rotate(x, self.cos, self.sin, rows.positions, back=back, out=x, pairs=self.pairs)

    def _grow(self, q: torch.Tensor, rows: Rows) -> None:
        if self.growth is not None:
            q.mul_(self.growth(rows.positions).to(q.dtype)[:, None, None])

    def attend(self, qkv: torch.Tensor, rows: Rows) -> Attended:
        """Rotate q and k, in place unless they are normed first, and attend."""
        q, k, v = self.split(qkv)
        if self.qk_norm is None:
            self._rotate(self._both(qkv), rows, back=False)
        else:
            q, k = (
                rms_norm_forward(x, weight, self.eps).view(len(qkv), -1, self.dim)
                for weight, x in self._norms(q, k)
            )
            for x in (q, k):
                self._rotate(x, rows, back=False)
        self._grow(q, rows)
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return Attended(q, k, v, Options(rows, scale, self.window, self.sinks))

    def backward(
        self, qkv: torch.Tensor, attended: Attended, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Return the gradient of qkv, from the gradient of the output [T, H D]."""
        d_qkv = torch.empty_like(qkv)
        parts, inputs = self.split(d_qkv), self.split(qkv)
        attended.backward(dy.view(attended.out.shape), parts)
        self._grow(parts[0], rows)
        self._rotate(self._both(d_qkv), rows, back=True)
        if self.qk_norm is not None:
            for part, (weight, x) in zip(parts, self._norms(*inputs[:2]), strict=False):
                d_x = rms_norm_backward(x, weight, self.eps, part.reshape(x.shape))
                part.copy_(d_x.view(part.shape))
        return d_qkv


class Mixer(Protocol):
    """Mixes the tokens of a row: attention (`Heads`), or something in its place."""

    def attend(self, packed: torch.Tensor, rows: Rows) -> Any:
        """Mix packed [T, in], as projected.

        -> what the backward pass needs, with the output `out` [T, heads * width]; it may have a
        dimension of heads
        """

    def backward(
        self, packed: torch.Tensor, mixed: Any, dy: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Return the gradient of `packed`, from that of the output [T, heads * width]."""


class _AttentionSublayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        norm: Norm,
        qkv: LoraWeight,
        out: LoraWeight,
        heads: Mixer,
        pools: Pools,
        segments: Segments,
        rows: Rows,
        keep: bool,
        out_norm: Norm,
    ) -> torch.Tensor:
        normed = norm.forward(hidden)
        packed = qkv.times(normed)
        u = lora_forward(normed, packed, pools.values, qkv.site, segments)
        attended = heads.attend(packed, rows)
        inner = attended.out.flatten(1)
        y = out.times(inner)
        residual = hidden if out_norm.weight is None else None
        out_u = lora_forward(inner, y, pools.values, out.site, segments, residual)
        ctx.save_for_backward(hidden, u, out_u, None if residual is not None else y)
        ctx.kept = (packed, attended) if keep else None
        ctx.parts = (norm, qkv, out, heads, pools, segments, rows, out_norm)
        return y if residual is not None else hidden + out_norm.forward(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        hidden, u, out_u, y = ctx.saved_tensors
        norm, qkv, out, heads, pools, segments, rows, out_norm = ctx.parts
        kept, ctx.kept = ctx.kept, None
        d_out, normed = dy.contiguous(), norm.forward(hidden)
        dy = d_out if y is None else out_norm.backward(y, d_out)
        if kept is None:
            packed = qkv.times(normed)
            lora_forward(normed, packed, pools.values, qkv.site, segments)
            kept = packed, heads.attend(packed, rows)
        packed, attended = kept
        inner = attended.out.flatten(1)
        d_inner = out.back(dy)
        du = lora_backward_b(out_u, dy, pools, out.site, segments)
        lora_backward_a(du, inner, d_inner, pools, out.site, segments)
        d_packed = heads.backward(packed, attended, d_inner, rows)
        del kept, packed, attended, inner, d_inner
        d_normed = qkv.back(d_packed)
        du = lora_backward_b(u, d_packed, pools, qkv.site, segments)
        lora_backward_a(du, normed, d_normed, pools, qkv.site, segments)
        dx = norm.backward(hidden, d_normed, d_out)
        return dx, None, None, None, None, None, None, None, None, None


def attention_sublayer(
    hidden: torch.Tensor,
    norm: Norm,
    qkv: LoraWeight,
    out: LoraWeight,
    heads: Mixer,
    pools: Pools,
    segments: Segments,
    rows: Rows,
    *,
    keep: bool = True,
    out_norm: Norm = NO_NORM,
) -> torch.Tensor:
    """hidden [T, E] -> hidden + attention of its norm [T, E].

    Differentiable in hidden, which must ask for its gradient; see `lora_linear` for the runs'.

    keep      qkv, the attention's output and its log-sum-exp are kept; else computed again
    out_norm  of what is added to hidden
    """
    y: torch.Tensor = _AttentionSublayer.apply(  # type: ignore[no-untyped-call]
        hidden, norm, qkv, out, heads, pools, segments, rows, keep, out_norm
    )
    return y


class _MlpSublayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        norm: Norm,
        gate_up: LoraWeight,
        down: LoraWeight,
        pools: Pools,
        segments: Segments,
        keep: bool,
        out_norm: Norm,
        is_gelu: bool,
    ) -> torch.Tensor:
        normed = norm.forward(hidden)
        both = gate_up.times(normed)
        u = lora_shrink(normed, pools.values, gate_up.site, segments)
        inner = lora_silu(both, u, pools.values, gate_up.site, segments, is_gelu)
        y = down.times(inner)
        residual = hidden if out_norm.weight is None else None
        down_u = lora_forward(inner, y, pools.values, down.site, segments, residual)
        ctx.save_for_backward(hidden, u, down_u, None if residual is not None else y)
        ctx.kept = both if keep else None
        ctx.parts = (norm, gate_up, down, pools, segments, out_norm, is_gelu)
        return y if residual is not None else hidden + out_norm.forward(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        hidden, u, down_u, y = ctx.saved_tensors
        norm, gate_up, down, pools, segments, out_norm, is_gelu = ctx.parts
        both, ctx.kept = ctx.kept, None
        d_out, normed = dy.contiguous(), norm.forward(hidden)
        dy = d_out if y is None else out_norm.backward(y, d_out)
        if both is None:
            both = gate_up.times(normed)
        inner = down.back(dy)
        du = lora_backward_b(down_u, dy, pools, down.site, segments)
        # `both` becomes its own gradient, and `inner`, which is its gradient, itself.
        lora_silu_backward(
            both, inner, u, du, pools.values, gate_up.site, down.site, segments, is_gelu
        )
        lora_backward_a(du, inner, None, pools, down.site, segments)
        del inner
        d_normed = gate_up.back(both)
        du = lora_backward_b(u, both, pools, gate_up.site, segments)
        lora_backward_a(du, normed, d_normed, pools, gate_up.site, segments)
        dx = norm.backward(hidden, d_normed, d_out)
        return dx, None, None, None, None, None, None, None, None


def mlp_sublayer(
    hidden: torch.Tensor,
    norm: Norm,
    gate_up: LoraWeight,
    down: LoraWeight,
    pools: Pools,
    segments: Segments,
    *,
    keep: bool = True,
    out_norm: Norm = NO_NORM,
    is_gelu: bool = False,
) -> torch.Tensor:
    """hidden [T, E] -> hidden + the gated MLP of its norm [T, E].

    Differentiable in hidden, which must ask for its gradient, once; see `lora_linear`.

    keep      the base's gate and up are kept; else computed again
    out_norm  of what is added to hidden
    is_gelu   whether the activation is GELU, not SiLU
    """
    y: torch.Tensor = _MlpSublayer.apply(  # type: ignore[no-untyped-call]
        hidden, norm, gate_up, down, pools, segments, keep, out_norm, is_gelu
    )
    return y
