"""Gates of attention: q_proj has them behind each head's q."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import ceil_div, jit, tl

# Numbers of a row that a program takes.
_BLOCK = 1024


class Packed(NamedTuple):
    """A projection's parts, which are added up: the base's product and the adapters' [T, N], bias.

    N is (2 H + 2 K) D: each head's q with its gate behind it, then k and v.
    """

    base: torch.Tensor
    delta: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def split_gates(
    packed: torch.Tensor, num_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """packed [T, (2 H + 2 K) D] -> copies of q, k, v [T, (H + 2 K) D] and of the gates [T, H D]"""
    queries = 2 * num_heads * head_dim
    q, gate = packed[:, :queries].view(len(packed), num_heads, 2, head_dim).unbind(2)
    return torch.cat((q.flatten(1), packed[:, queries:]), 1), gate.flatten(1)


def join_gates(
    qkv: torch.Tensor, gate: torch.Tensor, num_heads: int, head_dim: int
) -> torch.Tensor:
    """Undo `split_gates`."""
    size = num_heads * head_dim
    heads = (each.view(len(qkv), num_heads, head_dim) for each in (qkv[:, :size], gate))
    return torch.cat((torch.stack(tuple(heads), 2).flatten(1), qkv[:, size:]), 1)


@jit()
def _load_sum(
    base_ptr,
    delta_ptr,
    bias_ptr,
    place,
    source,
    mask,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    x = tl.load(base_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + source, mask=mask, other=0.0).to(tl.float32)
    return x


@jit()
def _gates_kernel(
    base_ptr,
    delta_ptr,
    bias_ptr,
    out_ptr,
    packed_width,
    width,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < width
    out = out_ptr + row * width + c
    # Behind each head's q is its gate; behind the last gate are k and v.
    source = c + tl.minimum(c // D + IS_GATE, H) * D
    place = row * packed_width + source
    x = _load_sum(base_ptr, delta_ptr, bias_ptr, place, source, mask, HAS_DELTA, HAS_BIAS)
    if IS_GATE:
        x = tl.load(out, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(x)
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(
    out: torch.Tensor, packed: Packed, num_heads: int, head_dim: int, *, is_gate: bool
) -> None:
    base, delta, bias = packed
    width = out.shape[1]
    _gates_kernel[(len(out), ceil_div(width, _BLOCK))](
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        bias_ptr=base if bias is None else bias,
        out_ptr=out,
        packed_width=base.shape[1],
        width=width,
        H=num_heads,
        D=head_dim,
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        IS_GATE=is_gate,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def split_heads_triton(packed: Packed, num_heads: int, head_dim: int) -> torch.Tensor:
    """Return q, k and v [T, (H + 2 K) D] without the gates."""
    base = packed.base
    out = base.new_empty(len(base), base.shape[1] - num_heads * head_dim)
    _launch(out, packed, num_heads, head_dim, is_gate=False)
    return out


def gate_heads_triton(
    attended: torch.Tensor, packed: Packed, num_heads: int, head_dim: int
) -> None:
    """Multiply attended [T, H D] by the sigmoids of the gates, in place."""
    _launch(attended, packed, num_heads, head_dim, is_gate=True)
