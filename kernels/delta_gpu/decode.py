"""One token of a gated delta net: each head's matrix is read and written once.

A program takes a sequence and a head. Both products with the matrix, k's and q's, are made of the
numbers as they were read: what the new token changes in the second follows from q's product with k.
The norm of what a head reads and the gate are here, too.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.delta import DeltaShape, DeltaWeights
from kernels.delta_gpu.inputs import (
    DeltaInputs,
    Projected,
    is_aligned,
    matrix_places,
    projected,
    rates_of,
)


@jit("num_pages", "first")
def _decode_kernel(
    mixed_ptr,
    base_ptr,
    delta_ptr,
    stride,
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
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    token = tl.load(query_start_ptr + s).to(tl.int64)
    num_new = tl.load(query_start_ptr + s + 1) - token
    if (num_new != 1) | (tl.load(write_ptr + s * num_pages) < 0):
        return
    k_index = tl.arange(0, BLOCK_K)
    v_index = tl.arange(0, BLOCK_V)
    number = first + head * (DK * DV)
    place, live = matrix_places(
        read_ptr + s * num_pages, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED
    )
    state = tl.load(arena_ptr + place, mask=live, other=0.0)
    key = mixed_ptr + token * CHANNELS + head // (HV // HK) * DK + k_index
    q = tl.load(key, mask=k_index < DK, other=0.0).to(tl.float32)
    k = tl.load(key + HK * DK, mask=k_index < DK, other=0.0).to(tl.float32)
    column = head * DV + v_index
    inside = v_index < DV
    v = tl.load(mixed_ptr + token * CHANNELS + 2 * HK * DK + column, mask=inside, other=0.0)
    row = token * stride + CHANNELS
    decay, beta = rates_of(
        base_ptr, delta_ptr, row + HV * DV, True, rate_ptr, shift_ptr, head, HV, HAS_DELTA
    )
    kept = tl.exp(decay)
    known = kept * tl.sum(state * k[:, None], axis=0)
    read = kept * tl.sum(state * q[:, None], axis=0)
    change = beta * (v.to(tl.float32) - known)
    read += change * tl.sum(q * k, axis=0)
    place, live = matrix_places(
        write_ptr + s * num_pages, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED
    )
    tl.store(arena_ptr + place, kept * state + k[:, None] * change[None, :], mask=live)
    gate = projected(base_ptr, delta_ptr, row + column, inside, HAS_DELTA)
    norm = tl.load(norm_ptr + v_index, mask=inside, other=0.0).to(tl.float32)
    read *= tl.rsqrt(tl.sum(read * read, axis=0) / DV + eps) * norm * gate * tl.sigmoid(gate)
    tl.store(out_ptr + token * (HV * DV) + column, read.to(out_ptr.dtype.element_ty), mask=inside)


def delta_decode_triton(
    mixed: torch.Tensor,
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

    mixed  as `convolve_triton` returns it
    first  the number in a sequence's states with which the layer's matrices begin
    max_registers  of a thread; with 128, two programs run on a multiprocessor
    """
    base, delta = given
    _decode_kernel[(shape.num_values, inputs.num_rows)](
        mixed_ptr=mixed,
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
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
        eps=eps,
        HK=shape.num_keys,
        HV=shape.num_values,
        DK=shape.key_dim,
        DV=shape.value_dim,
        PAGE=arena.shape[1],
        IS_ALIGNED=is_aligned(shape, arena.shape[1]),
        HAS_DELTA=delta is not None,
        BLOCK_K=next_power_of_2(shape.key_dim),
        BLOCK_V=next_power_of_2(shape.value_dim),
        num_warps=num_warps,
        maxnreg=max_registers,
    )
