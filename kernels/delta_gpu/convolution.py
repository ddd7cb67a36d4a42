"""The short convolution of prompts over each channel, and its memory: the last inputs.

A program takes a head of q, k or v and some tokens. Heads of q and k come out with length one, q
also times 1 / sqrt(width). A prompt's first tokens read the memory, in other programs than its last
ones, so that a second launch replaces it.
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.delta import EPS, DeltaShape
from kernels.delta_gpu.inputs import DeltaInputs, Projected, place_of, projected

_BLOCK_T, _BLOCK_C = 8, 256


@jit()
def past_input(
    base_ptr,
    delta_ptr,
    token,
    stride,
    channel,
    is_new,
    any_old,
    mask,
    arena_ptr,
    pages_ptr,
    number,
    PAGE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Load inputs of the convolution: of tokens in this step if `is_new`, else from the memory.

    any_old  False: all are new, so that no page is looked up
    """
    x = projected(base_ptr, delta_ptr, token * stride + channel, mask & is_new, HAS_DELTA)
    if any_old:
        place = place_of(pages_ptr, number, mask & (is_new == 0), PAGE)
        x += tl.load(arena_ptr + tl.maximum(place, 0), mask=place >= 0, other=0.0)
    return x


@jit("num_tokens", "num_rows", "num_pages", "first")
def _convolve_kernel(
    base_ptr,
    delta_ptr,
    stride,
    weight_ptr,
    out_ptr,
    arena_ptr,
    token_row_ptr,
    query_start_ptr,
    read_ptr,
    num_tokens,
    num_rows,
    num_pages,
    first,
    scale,
    eps,
    HK: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    head = tl.program_id(0)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    is_key = head < 2 * HK
    channel = tl.where(is_key, head * DK, 2 * HK * DK + (head - 2 * HK) * DV) + c
    row = tl.load(token_row_ptr + t, mask=t < num_tokens, other=num_rows)
    start = tl.load(query_start_ptr + row, mask=row < num_rows, other=0)
    live = tl.load(query_start_ptr + row + 1, mask=row < num_rows, other=0) - start > 1
    inside = c < (DK if DK == DV else tl.where(is_key, DK, DV))
    mask = live[:, None] & inside[None, :]
    pages = row.to(tl.int64)[:, None] * num_pages
    any_old = tl.min(t - start, axis=0) < KERNEL - 1
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for j in tl.static_range(KERNEL):
        since = t - start + j - (KERNEL - 1)  # tokens from the first of this step; less: memory
        x = past_input(
            base_ptr,
            delta_ptr,
            (start + since).to(tl.int64)[:, None],
            stride,
            channel[None, :],
            (since >= 0)[:, None],
            any_old,
            mask,
            arena_ptr,
            read_ptr + pages,
            first + (since + KERNEL - 1)[:, None] * CHANNELS + channel[None, :],
            PAGE,
            HAS_DELTA,
        )
        w = tl.load(weight_ptr + channel * KERNEL + j, mask=inside, other=0.0)
        total += x * w.to(tl.float32)[None, :]
    total *= tl.sigmoid(total)
    length = tl.rsqrt(tl.sum(total * total, axis=1) + eps) * tl.where(head < HK, scale, 1.0)
    total *= tl.where(is_key, length, 1.0)[:, None]
    out = out_ptr + t.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit("num_pages", "first")
def _window_kernel(
    base_ptr,
    delta_ptr,
    stride,
    arena_ptr,
    query_start_ptr,
    read_ptr,
    write_ptr,
    num_pages,
    first,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(query_start_ptr + s).to(tl.int64)
    length = (tl.load(query_start_ptr + s + 1) - start).to(tl.int32)
    if length < 2:
        return
    inside = channel < CHANNELS
    for j in tl.static_range(KERNEL - 1):
        since = length + j - (KERNEL - 1)
        x = past_input(
            base_ptr,
            delta_ptr,
            start + since,
            stride,
            channel,
            since >= 0,
            since < 0,
            inside,
            arena_ptr,
            read_ptr + s * num_pages,
            first + (length + j) * CHANNELS + channel,
            PAGE,
            HAS_DELTA,
        )
        place = place_of(write_ptr + s * num_pages, first + j * CHANNELS + channel, inside, PAGE)
        tl.debug_barrier()  # another thread may have read what is replaced
        tl.store(arena_ptr + tl.maximum(place, 0), x, mask=place >= 0)


def convolve_triton(
    given: Projected,
    weight: torch.Tensor,
    arena: torch.Tensor,
    inputs: DeltaInputs,
    shape: DeltaShape,
    first: int,
) -> torch.Tensor:
    """Convolve prompts, and keep the last inputs of each.

    weight  [channels, kernel]
    arena   [P, numbers] fp32
    first   the layer's first number in a sequence's states
    -> [T, channels] like the base's part: q and k, normed, and v; of prompts alone
    """
    base, delta = given
    num_tokens, channels = len(base), shape.widths[0]
    out = torch.empty(num_tokens, channels, dtype=base.dtype, device=base.device)
    heads = 2 * shape.num_keys + shape.num_values
    _convolve_kernel[(heads, ceil_div(num_tokens, _BLOCK_T))](
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
        weight_ptr=weight,
        out_ptr=out,
        arena_ptr=arena,
        token_row_ptr=inputs.token_row,
        query_start_ptr=inputs.query_start,
        read_ptr=inputs.read,
        num_tokens=num_tokens,
        num_rows=inputs.num_rows,
        num_pages=inputs.num_pages,
        first=first,
        scale=shape.key_dim**-0.5,
        eps=EPS,
        HK=shape.num_keys,
        DK=shape.key_dim,
        DV=shape.value_dim,
        CHANNELS=channels,
        KERNEL=shape.kernel,
        PAGE=arena.shape[1],
        HAS_DELTA=delta is not None,
        BLOCK_T=_BLOCK_T,
        BLOCK_C=next_power_of_2(max(shape.key_dim, shape.value_dim)),
        num_warps=4,
    )
    _window_kernel[(inputs.num_rows, ceil_div(channels, _BLOCK_C))](
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
        arena_ptr=arena,
        query_start_ptr=inputs.query_start,
        read_ptr=inputs.read,
        write_ptr=inputs.write,
        num_pages=inputs.num_pages,
        first=first,
        CHANNELS=channels,
        KERNEL=shape.kernel,
        PAGE=arena.shape[1],
        HAS_DELTA=delta is not None,
        BLOCK_C=_BLOCK_C,
        num_warps=4,
    )
    return out
