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


@jit()
def part_of(x, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return one of the parts [BLOCK] that lie in x one after the other."""
    chosen = tl.arange(0, PARTS)[:, None] == part
    return tl.sum(tl.where(chosen, tl.reshape(x, (PARTS, BLOCK)), 0.0), axis=0)


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
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    GROUP: tl.constexpr = HV // HK
    key_head = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + s).to(tl.int64)
    num_new = tl.load(query_start_ptr + s + 1) - token
    read_ptr += s * num_pages
    write_ptr += s * num_pages
    if (num_new != 1) | (tl.load(write_ptr) < 0):
        return
    HALF: tl.constexpr = BLOCK // 2
    c = tl.arange(0, BLOCK)
    half = tl.arange(0, 2)[:, None]
    v_index = tl.arange(0, HALF)
    row = token * stride
    # Loads do not pass the barrier in the convolution: the first numbers are under way before it.
    number = first + (KERNEL - 1) * CHANNELS + key_head * (GROUP * DK * DV)
    place, live = matrix_places(read_ptr, number, c, v_index, DK, DV, PAGE, IS_ALIGNED)
    state = tl.load(arena_ptr + place, mask=live, other=0.0)
    values = half * HALF + v_index[None, :]
    norm = tl.load(norm_ptr + values, mask=values < DV, other=0.0).to(tl.float32)
    # The channels of q, of k, and of each head of v.
    part = tl.arange(0, PARTS * BLOCK) // BLOCK
    column = tl.arange(0, PARTS * BLOCK) % BLOCK
    value = 2 * HK * DK + (key_head * GROUP + part - 2) * DV
    channel = tl.where(part < 2, (part * HK + key_head) * DK, value) + column
    inside = (part < 2 + GROUP) & (column < tl.where(part < 2, DK, DV))
    mixed = convolve_token(
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
        CHANNELS,
        KERNEL,
        PAGE,
        HAS_DELTA,
        BLOCK_J,
    )
    q, k = part_of(mixed, 0, PARTS, BLOCK), part_of(mixed, 1, PARTS, BLOCK)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + unit_eps) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + unit_eps)
    for i in tl.static_range(GROUP):
        head = key_head * GROUP + i
        gate = row + CHANNELS + head * DV + values
        gate = projected(base_ptr, delta_ptr, gate, values < DV, HAS_DELTA)
        rates = row + CHANNELS + HV * DV
        decay, beta = rates_of(
            base_ptr, delta_ptr, rates, True, rate_ptr, shift_ptr, head, HV, HAS_DELTA
        )
        kept = tl.exp(decay)
        value = tl.reshape(part_of(mixed, 2 + i, PARTS, BLOCK), (2, HALF))
        reads = tl.zeros((2, HALF), dtype=tl.float32)
        for h in tl.static_range(2):
            if i + h > 0:
                place, live = matrix_places(
                    read_ptr, number, c, h * HALF + v_index, DK, DV, PAGE, IS_ALIGNED
                )
                state = tl.load(arena_ptr + place, mask=live, other=0.0)
            v = tl.sum(tl.where(half == h, value, 0.0), axis=0)
            change = beta * (v - kept * tl.sum(state * k[:, None], axis=0))
            read = kept * tl.sum(state * q[:, None], axis=0) + change * tl.sum(q * k, axis=0)
            place, live = matrix_places(
                write_ptr, number, c, h * HALF + v_index, DK, DV, PAGE, IS_ALIGNED
            )
            tl.store(arena_ptr + place, kept * state + k[:, None] * change[None, :], mask=live)
            reads = tl.where(half == h, read[None, :], reads)
        number += DK * DV
        reads *= tl.rsqrt(tl.sum(tl.sum(reads * reads, axis=1), axis=0) / DV + eps) * norm
        reads *= gate * tl.sigmoid(gate)
        out = out_ptr + token * (HV * DV) + head * DV + values
        tl.store(out, reads.to(out_ptr.dtype.element_ty), mask=values < DV)


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
    num_warps: int = 4,
    max_registers: int = 168,
) -> None:
    """Mix the sequences with one new token; write their rows of out [T, value_size], no others.

    arena  [P, numbers] fp32
    first  the layer's first number in a sequence's states
    max_registers  of a thread; with 168, three programs run on a multiprocessor
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
        PARTS=next_power_of_2(2 + shape.num_values // shape.num_keys),
        BLOCK=max(2, next_power_of_2(max(shape.key_dim, shape.value_dim))),
        num_warps=num_warps,
        maxnreg=max_registers,
    )
