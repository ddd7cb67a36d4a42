"""One token of a gated delta net: each head's matrix is read and written once.

A program takes a sequence and a head of k, with the heads of v that share it: the convolution of
all their channels, whose memory nobody else reads, the rule, the norm and the gate. Both products
with the matrix, k's and q's, are made of the numbers as they were read: what the new token changes
in the second follows from q's product with k.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.delta import EPS, DeltaShape, DeltaWeights
from kernels.delta_gpu.inputs import (
    DeltaInputs,
    Projected,
    is_aligned,
    matrix_places,
    place_of,
    projected,
    rates_of,
)


@jit()
def convolve_token(
    base_ptr,
    delta_ptr,
    row,
    channel,
    inside,
    weight_ptr,
    arena_ptr,
    read_ptr,
    write_ptr,
    first,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Return a token's channels behind the convolution, and replace its memory of them."""
    j = tl.arange(0, BLOCK_J)[:, None]
    channel = channel[None, :]
    past = inside[None, :] & (j < KERNEL - 1)
    place = place_of(read_ptr, first + j * CHANNELS + channel, past, PAGE)
    x = tl.load(arena_ptr + tl.maximum(place, 0), mask=place >= 0, other=0.0)
    is_new = inside[None, :] & (j == KERNEL - 1)
    x += projected(base_ptr, delta_ptr, row + channel, is_new, HAS_DELTA)
    mask = inside[None, :] & (j < KERNEL)
    w = tl.load(weight_ptr + channel * KERNEL + j, mask=mask, other=0.0).to(tl.float32)
    place = place_of(write_ptr, first + (j - 1) * CHANNELS + channel, mask & (j > 0), PAGE)
    tl.debug_barrier()  # another thread may have read what is replaced
    tl.store(arena_ptr + tl.maximum(place, 0), x, mask=place >= 0)
    total = tl.sum(x * w, axis=0)
    return total * tl.sigmoid(total)


@jit("num_pages", "first")
def _delta_decode_kernel(
    base_ptr,
    delta_ptr,
    stride,
    weight_ptr,
    rate_ptr,
    shift_ptr,
    norm_ptr,
    out_ptr,
    arena_ptr,
    query_start_ptr,
    read_ptr,
    write_ptr,
    num_pages,
    first,
    scale,
    unit_eps,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KERNEL: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + s).to(tl.int64)
    num_new = tl.load(query_start_ptr + s + 1) - token
    read_ptr += s * num_pages
    write_ptr += s * num_pages
    if (num_new != 1) | (tl.load(write_ptr) < 0):
        return
    k_index = tl.arange(0, BLOCK_K)
    v_index = tl.arange(0, BLOCK_V)
    inside = v_index < DV
    row = token * stride
    q = convolve_token(
        base_ptr,
        delta_ptr,
        row,
        key_head * DK + k_index,
        k_index < DK,
        weight_ptr,
        arena_ptr,
        read_ptr,
        write_ptr,
        first,
        CHANNELS,
        KERNEL,
        PAGE,
        HAS_DELTA,
        BLOCK_J,
    )
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale
    k = convolve_token(
        base_ptr,
        delta_ptr,
        row,
        (HK + key_head) * DK + k_index,
        k_index < DK,
        weight_ptr,
        arena_ptr,
        read_ptr,
        write_ptr,
        first,
        CHANNELS,
        KERNEL,
        PAGE,
        HAS_DELTA,
        BLOCK_J,
    )
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps)
    norm = tl.load(norm_ptr + v_index, mask=inside, other=0.0).to(tl.float32)
    for head in range(key_head * (HV // HK), (key_head + 1) * (HV // HK)):
        number = first + (KERNEL - 1) * CHANNELS + head * (DK * DV)
        place, live = matrix_places(read_ptr, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED)
        state = tl.load(arena_ptr + place, mask=live, other=0.0)
        column = head * DV + v_index
        v = convolve_token(
            base_ptr,
            delta_ptr,
            row,
            2 * HK * DK + column,
            inside,
            weight_ptr,
            arena_ptr,
            read_ptr,
            write_ptr,
            first,
            CHANNELS,
            KERNEL,
            PAGE,
            HAS_DELTA,
            BLOCK_J,
        )
        at = row + CHANNELS + HV * DV
        decay, beta = rates_of(
            base_ptr, delta_ptr, at, True, rate_ptr, shift_ptr, head, HV, HAS_DELTA
        )
        kept = tl.exp(decay)
        change = beta * (v - kept * tl.sum(state * k[:, None], axis=0))
        read = kept * tl.sum(state * q[:, None], axis=0) + change * tl.sum(q * k, axis=0)
        place, live = matrix_places(write_ptr, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED)
        tl.store(arena_ptr + place, kept * state + k[:, None] * change[None, :], mask=live)
        gate = projected(base_ptr, delta_ptr, row + CHANNELS + column, inside, HAS_DELTA)
        read *= tl.rsqrt(tl.sum(read * read, axis=0) / DV + eps) * norm
        read *= gate * tl.sigmoid(gate)
        out = out_ptr + token * (HV * DV) + column
        tl.store(out, read.to(out_ptr.dtype.element_ty), mask=inside)


def delta_decode_triton(
    given: Projected,
    weights: DeltaWeights,
    arena: torch.Tensor,
    inputs: DeltaInputs,
    shape: DeltaShape,
    first: int,
    eps: float,
    out: torch.Tensor,
    *,
    num_warps: int = 8,
    max_registers: int = 128,
) -> None:
    """Mix the sequences with one new token; write their rows of out [T, value_size], no others.

    arena  [P, numbers] fp32
    first  the layer's first number in a sequence's states
    max_registers  of a thread; with 128, two programs run on a multiprocessor
    """
    base, delta = given
    _delta_decode_kernel[(shape.num_keys, inputs.num_rows)](
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
        weight_ptr=weights.convolution,
        rate_ptr=weights.rate,
        shift_ptr=weights.shift,
        norm_ptr=weights.norm,
        out_ptr=out,
        arena_ptr=arena,
        query_start_ptr=inputs.query_start,
        read_ptr=inputs.read,
        write_ptr=inputs.write,
        num_pages=inputs.num_pages,
        first=first,
        scale=shape.key_dim**-0.5,
        unit_eps=EPS,
        eps=eps,
        HK=shape.num_keys,
        HV=shape.num_values,
        DK=shape.key_dim,
        DV=shape.value_dim,
        KERNEL=shape.kernel,
        PAGE=arena.shape[1],
        IS_ALIGNED=is_aligned(shape, arena.shape[1]),
        HAS_DELTA=delta is not None,
        BLOCK_J=next_power_of_2(shape.kernel),
        BLOCK_K=next_power_of_2(shape.key_dim),
        BLOCK_V=next_power_of_2(shape.value_dim),
        num_warps=num_warps,
        maxnreg=max_registers,
    )
