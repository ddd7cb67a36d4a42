"""Rotary position embedding of q and k, and the write of k and v into their pages.

The kernel first adds the adapters' output to q, k and v, which was computed separately. In model
families that have them, it also applies the bias and the norm of each head's q and k. An FP8
product gets its scales first.

Source: RoFormer, arXiv:2104.09864.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.fp8 import Scales
from kernels.kv_pages import PageLayout


class Pairs(NamedTuple):
    """Which dimensions of a head turn together: the first `width` alone turn.

    is_interleaved  each even one with the next; else each with the one half a width further
    """

    width: int
    is_interleaved: bool

    def order(self, dim: int, device: torch.device | None = None) -> torch.Tensor:
        """Return [D] int64: the dimensions such that each turns with the one D / 2 further.

        Those that do not turn are paired, too: their angle is zero.
        """
        turning = torch.arange(self.width, device=device)
        rest = torch.arange(self.width, dim, device=device)
        if self.is_interleaved:
            low, high = turning[::2], turning[1::2]
        else:
            low, high = turning.chunk(2)
        rest_low, rest_high = rest.chunk(2) if len(rest) else (rest, rest)
        return torch.cat((low, rest_low, high, rest_high))


@jit()
def pair_of(d, D: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return both dimensions of the pairs d, in the order of `Pairs.order`."""
    if INTERLEAVED:
        first = tl.where(d < WIDTH // 2, 2 * d, d + WIDTH // 2)
        second = tl.where(d < WIDTH // 2, 2 * d + 1, d + D // 2)
    else:
        first = tl.where(d < WIDTH // 2, d, d + WIDTH // 2)
        second = tl.where(d < WIDTH // 2, d + WIDTH // 2, d + D // 2)
    return first, second


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rope_kv_write_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v to their slots, return the rotated q.

    q          [T, H, D]
    k, v       [T, K, D]
    cos, sin   [M, D] fp32   tables by position; the second half of a row repeats the first; None:
                             nothing is rotated
    positions  [T]
    arena      [P, page_elems], written
    slots      [T] int64     page * B + offset of each token
    -> [T, H, D]
    """
    if cos is not None and sin is not None:
        token_cos = cos[positions].unsqueeze(1).to(q.dtype)
        token_sin = sin[positions].unsqueeze(1).to(q.dtype)
        q, k = (_rotate(x, token_cos, token_sin) for x in (q, k))
    pages = layout.kv(arena).view(
        -1, layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim
    )[:, layer]  # [P, 2, K, B, D]
    if layout.is_fp8:
        pages = pages.view(torch.uint8)  # torch puts no E4M3 by index
    page, offset = slots // layout.page_size, slots % layout.page_size
    key_scale, value_scale = layout.scales_of(layer)
    keys = layout.stored(k, key_scale, arena)
    pages[page, 0, :, offset] = keys.view(pages.dtype)
    pages[page, 1, :, offset] = layout.stored(v, value_scale, arena).view(pages.dtype)
    return q


@jit("layer", "num_tokens")
def _rope_kernel(
    qkv_ptr,
    delta_ptr,
    bias_ptr,
    norm_ptr,
    row_scale_ptr,
    column_scale_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    arena_ptr,
    page_elems,
    layer_stride,
    value_stride,
    num_tokens,
    layer,
    eps,
    key_scale,
    value_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_HALF)
    live = t < num_tokens
    mask = live[:, None] & (d < HALF)[None, :]
    rows = t.to(tl.int64)
    # Pairs lie side by side from here on: scores are sums over a head, whatever its order.
    first, second = d, d + HALF
    if WIDTH < D or INTERLEAVED:
        paired, partner = pair_of(d, D, WIDTH, INTERLEAVED)
        first = tl.where(head < H + K, paired, first)
        second = tl.where(head < H + K, partner, second)
    row = rows[:, None] * ((H + 2 * K) * D) + head * D
    place, other = row + first[None, :], row + second[None, :]
    low = tl.load(qkv_ptr + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + other, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        row_scale = tl.load(row_scale_ptr + rows, mask=live, other=0.0)[:, None]
        columns = column_scale_ptr + head * D
        low *= row_scale * tl.load(columns + first, mask=d < HALF, other=0.0)[None, :]
        high *= row_scale * tl.load(columns + second, mask=d < HALF, other=0.0)[None, :]
    if HAS_DELTA:
        low += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
        high += tl.load(delta_ptr + other, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own = bias_ptr + head * D
        low += tl.load(own + first, mask=d < HALF, other=0.0).to(tl.float32)
        high += tl.load(own + second, mask=d < HALF, other=0.0).to(tl.float32)
    if head < H + K:
        if HAS_NORM:
            weight = norm_ptr + tl.where(head < H, 0, D)
            squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            inverse = tl.rsqrt(squares / D + eps)[:, None]
            low *= inverse * tl.load(weight + first, mask=d < HALF, other=0.0).to(tl.float32)
            high *= inverse * tl.load(weight + second, mask=d < HALF, other=0.0).to(tl.float32)
        if HAS_ROTATION:
            position = tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int64)
            angle = position[:, None] * D + d[None, :]
            cos_low = tl.load(cos_ptr + angle, mask=mask, other=0.0)
            sin_low = tl.load(sin_ptr + angle, mask=mask, other=0.0)
            cos_high = tl.load(cos_ptr + angle + HALF, mask=mask, other=0.0)
            sin_high = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0)
            rotated = low * cos_low - high * sin_low
            high = high * cos_high + low * sin_high
            low = rotated
    if head < H:
        out = out_ptr + rows[:, None] * (H * D) + head * D + d[None, :]
        tl.store(out, low.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + HALF, high.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        is_value = head >= H + K
        kv_head = head - H - tl.where(is_value, K, 0)
        slot = tl.load(slots_ptr + rows, mask=live, other=-1)
        offset = (slot // PAGE) * page_elems + layer.to(tl.int64) * layer_stride
        offset += kv_head * (PAGE * D) + (slot % PAGE) * D + tl.where(is_value, value_stride, 0)
        page = arena_ptr + offset[:, None] + d[None, :]
        writes = mask & (slot >= 0)[:, None]
        if IS_FP8:
            scale = tl.where(is_value, value_scale, key_scale)
            low = tl.minimum(tl.maximum(low / scale, -448.0), 448.0)
            high = tl.minimum(tl.maximum(high / scale, -448.0), 448.0)
        tl.store(page, low.to(arena_ptr.dtype.element_ty), mask=writes)
        tl.store(page + HALF, high.to(arena_ptr.dtype.element_ty), mask=writes)


def rope_kv_write_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
    *,
    num_heads: int,
    delta: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    scales: Scales | None = None,
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """Launch the kernel on rows that have q, k and v side by side.

    qkv     [T, (H + 2 K) D] contiguous
    slots   [T] int64; -1: a padding row, nothing is written
    scales  what qkv is to be multiplied by before anything is added to it
    delta   like qkv, added to it first
    bias    [(H + 2 K) D], added too
    norm    [2, D]: weights of the RMSNorm (with eps) of each head's q and k before the rotation
    pairs   None: each dimension turns with the one half a head further; else the heads that are
            returned and written have the order of `Pairs.order`
    -> [T, H, D]
    """
    pairs = pairs or Pairs(layout.head_dim, is_interleaved=False)
    num_tokens, dim = qkv.shape[0], layout.head_dim
    out = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    key_scale, value_scale = layout.scales_of(layer)
    block_t = min(16, next_power_of_2(num_tokens))
    _rope_kernel[(num_heads + 2 * layout.num_kv_heads, ceil_div(num_tokens, block_t))](
        qkv_ptr=qkv,
        delta_ptr=qkv if delta is None else delta,
        bias_ptr=qkv if bias is None else bias,
        norm_ptr=qkv if norm is None else norm,
        row_scale_ptr=qkv if scales is None else scales.rows,
        column_scale_ptr=qkv if scales is None else scales.columns,
        out_ptr=out,
        cos_ptr=qkv if cos is None else cos,
        sin_ptr=qkv if sin is None else sin,
        positions_ptr=positions,
        slots_ptr=slots,
        arena_ptr=layout.kv(arena),
        page_elems=layout.page_numbers,
        layer_stride=layout.layer_stride,
        value_stride=layout.value_stride,
        num_tokens=num_tokens,
        layer=layer,
        eps=eps,
        key_scale=key_scale,
        value_scale=value_scale,
        H=num_heads,
        K=layout.num_kv_heads,
        D=dim,
        PAGE=layout.page_size,
        WIDTH=pairs.width,
        INTERLEAVED=pairs.is_interleaved,
        HAS_ROTATION=cos is not None,
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_SCALES=scales is not None,
        IS_FP8=layout.is_fp8,
        BLOCK_T=block_t,
        BLOCK_HALF=next_power_of_2(dim // 2),
        num_warps=2,
    )
    return out


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v to their slots, return the rotated q.

    Shapes as in `rope_kv_write_ref`.
    """
    if use_triton(q):
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return rope_kv_write_triton(
            qkv, cos, sin, positions, arena, layout, layer, slots, num_heads=q.shape[1]
        )
    return rope_kv_write_ref(q, k, v, cos, sin, positions, arena, layout, layer, slots)
