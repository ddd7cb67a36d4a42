"""Rotary position embedding of packed tokens; the gradient is the rotation back."""

from __future__ import annotations

from typing import Any

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.rope import Pairs, pair_of


def rotate_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, back: bool
) -> torch.Tensor:
    """x [T, heads, D] -> the same shape, rotated by the angles of its positions, or back."""
    token_cos = cos[positions].unsqueeze(1).to(x.dtype)
    token_sin = sin[positions].unsqueeze(1).to(x.dtype)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * token_cos - turned * token_sin if back else x * token_cos + turned * token_sin


@jit("num_tokens")
def _rotate_kernel(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    num_tokens,
    x_stride,
    out_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_HALF)
    live = t < num_tokens
    mask = live[:, None] & (d < HALF)[None, :]
    rows = t.to(tl.int64)[:, None]
    position = tl.load(positions_ptr + t, mask=live, other=0).to(tl.int64)
    angle = position[:, None] * D + d[None, :]
    first, second = d, d + HALF
    if WIDTH < D or INTERLEAVED:
        first, second = pair_of(d, D, WIDTH, INTERLEAVED)
    x = x_ptr + rows * x_stride + head * D
    low = tl.load(x + first[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + second[None, :], mask=mask, other=0.0).to(tl.float32)
    cos_low = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    cos_high = tl.load(cos_ptr + angle + HALF, mask=mask, other=0.0)
    sin_low = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    sin_high = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0)
    if BACK:  # the transpose: the halves' sines change places with their sign
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high
    out = out_ptr + rows * out_stride + head * D
    tl.store(out + first[None, :], new_low.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + second[None, :], new_high.to(out_ptr.dtype.element_ty), mask=mask)


def rotate_triton(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    back: bool,
    out: torch.Tensor | None = None,
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """As `rotate_torch`; heads lie side by side, in rows that may be longer.

    out  written instead of a new tensor; may be x itself
    """
    num_tokens, heads, dim = x.shape
    out = x.new_empty(x.shape) if out is None else out
    assert x.stride()[1:] == out.stride()[1:] == (dim, 1)
    block_t = min(32, next_power_of_2(num_tokens))
    pairs = pairs or Pairs(dim, is_interleaved=False)
    if num_tokens:
        _rotate_kernel[(heads, ceil_div(num_tokens, block_t))](
            x_ptr=x, out_ptr=out, cos_ptr=cos, sin_ptr=sin, positions_ptr=positions,
            num_tokens=num_tokens, x_stride=x.stride(0), out_stride=out.stride(0), D=dim,
            WIDTH=pairs.width, INTERLEAVED=pairs.is_interleaved, BACK=back,
            BLOCK_T=block_t, BLOCK_HALF=next_power_of_2(dim // 2), num_warps=4,
        )  # fmt: skip
    return out


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    back: bool,
    out: torch.Tensor | None = None,
    pairs: Pairs | None = None,
) -> torch.Tensor:
    """x [T, heads, D] -> rotated by the angles of its positions, or back.

    out    written instead of a new tensor; may be x itself
    pairs  None: each dimension turns with the one half a head further
    """
    if use_triton(x):
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
        return rotate_triton(x, cos, sin, positions, back, out, pairs)
    if pairs is None:
        rotated = rotate_torch(x, cos, sin, positions, back)
    else:
        order = pairs.order(x.shape[-1], x.device)
        turned = rotate_torch(x[..., order], cos, sin, positions, back)
        rotated = torch.empty_like(turned)
        rotated[..., order] = turned
    return rotated if out is None else out.copy_(rotated)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        ctx.angles = (cos, sin, positions)
        return rotate(x, cos, sin, positions, back=False)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        cos, sin, positions = ctx.angles
        return rotate(dy, cos, sin, positions, back=True), None, None, None


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rotate each head of x [T, heads, D] by its token's position.

    cos, sin   [M, D] tables by position, the first half repeated (Hugging Face's form)
    positions  [T] int64, in the token's row
    """
    out: torch.Tensor = _Rope.apply(  # type: ignore[no-untyped-call]
        x, cos, sin, positions
    )
    return out
