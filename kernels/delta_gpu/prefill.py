"""A prompt through a gated delta net, in chunks whose tokens are computed together.

With G the decays from one token of a chunk to another, the changes u of a chunk behind state S are

    (I + A) u = beta (v - exp(g) k S),    A = beta G (k k^T) below the diagonal

so that u = U - W S with U = (I + A)^-1 beta v, W = (I + A)^-1 beta exp(g) k. U, W and the scores
G (q k^T) of all chunks are made side by side; then a program for each sequence and head goes from
chunk to chunk. Source: Yang et al., arXiv:2412.06464, section 3.3.

The inverse is exact: those of blocks of 1, 2, 4 ... rows on the diagonal, two at a time, make that
of a block twice as large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.delta import DeltaShape, DeltaWeights
from kernels.delta_gpu.convolution import convolve_triton
from kernels.delta_gpu.inputs import (
    DeltaInputs,
    Projected,
    is_aligned,
    matrix_places,
    projected,
    rates_of,
)


def chunk_of(dtype: torch.dtype) -> int:
    """Return the tokens of a chunk: in fp32 fewer, so that they fit on a multiprocessor."""
    return 64 if dtype.itemsize == 2 else 32


@jit()
def inverse_below(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a [CHUNK, CHUNK] that is zero but below the diagonal."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    size = 2
    while size < CHUNK:
        is_beside = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        half = tl.dot(tl.where(is_beside, a, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, half, input_precision=PRECISION)
        size *= 2
    return inverse


@jit()
def _delta_chunk_kernel(
    mixed_ptr,
    base_ptr,
    delta_ptr,
    stride,
    rate_ptr,
    shift_ptr,
    u_ptr,
    w_ptr,
    scores_ptr,
    total_ptr,
    query_start_ptr,
    chunk_row_ptr,
    chunk_start_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(chunk_row_ptr + chunk)
    if row < 0:
        return
    i = tl.arange(0, CHUNK)
    t = tl.load(chunk_start_ptr + chunk).to(tl.int64) + i
    live = t < tl.load(query_start_ptr + row + 1)
    place = t * stride + CHANNELS + HV * DV
    decay, beta = rates_of(
        base_ptr, delta_ptr, place, live, rate_ptr, shift_ptr, head, HV, HAS_DELTA
    )
    total = tl.cumsum(tl.where(live, decay, 0.0), axis=0)
    c = tl.arange(0, BLOCK_K)
    is_key = live[:, None] & (c < DK)[None, :]
    key = mixed_ptr + t[:, None] * CHANNELS + head // (HV // HK) * DK + c[None, :]
    k = tl.load(key + HK * DK, mask=is_key, other=0.0)
    is_past = i[:, None] >= i[None, :]
    since = tl.where(is_past, total[:, None] - total[None, :], float("-inf"))
    since = tl.exp(since)
    below = tl.dot(k, tl.trans(k), input_precision="ieee") * since * beta[:, None]
    below = tl.where(i[:, None] > i[None, :], below, 0.0)
    inverse = inverse_below(below, CHUNK, PRECISION).to(k.dtype)
    q = tl.load(key, mask=is_key, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * since
    unit = t * HV + head
    to = scores_ptr + unit[:, None] * CHUNK + i[None, :]
    tl.store(to, scores.to(k.dtype), mask=live[:, None])
    tl.store(total_ptr + unit, total, mask=live)
    k = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    w = tl.dot(inverse, k, input_precision="ieee")
    tl.store(w_ptr + unit[:, None] * DK + c[None, :], w.to(k.dtype), mask=is_key)
    c = tl.arange(0, BLOCK_V)
    is_value = live[:, None] & (c < DV)[None, :]
    value = t[:, None] * CHANNELS + 2 * HK * DK + head * DV + c[None, :]
    v = tl.load(mixed_ptr + value, mask=is_value, other=0.0)
    v = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    u = tl.dot(inverse, v, input_precision="ieee")
    tl.store(u_ptr + unit[:, None] * DV + c[None, :], u.to(k.dtype), mask=is_value)


@jit("num_pages", "first")
def _delta_prefill_kernel(
    mixed_ptr,
    base_ptr,
    delta_ptr,
    stride,
    u_ptr,
    w_ptr,
    scores_ptr,
    total_ptr,
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
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_ptr + s)
    end = tl.load(query_start_ptr + s + 1)
    if end - start < 2:
        return
    i = tl.arange(0, CHUNK)
    k_index = tl.arange(0, BLOCK_K)
    v_index = tl.arange(0, BLOCK_V)
    is_key = (k_index < DK)[None, :]
    is_value = (v_index < DV)[None, :]
    number = first + head * (DK * DV)
    place, there = matrix_places(
        read_ptr + s * num_pages, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED
    )
    state = tl.load(arena_ptr + place, mask=there, other=0.0)
    norm = tl.load(norm_ptr + v_index, mask=v_index < DV, other=0.0).to(tl.float32)
    for begin in range(start, end, CHUNK):
        t = (begin + i).to(tl.int64)
        live = t < end
        unit = t * HV + head
        total = tl.load(total_ptr + unit, mask=live, other=0.0)
        last = tl.load(total_ptr + tl.minimum(begin + CHUNK, end).to(tl.int64) * HV - HV + head)
        w = tl.load(
            w_ptr + unit[:, None] * DK + k_index[None, :], mask=live[:, None] & is_key, other=0.0
        )
        u = tl.load(
            u_ptr + unit[:, None] * DV + v_index[None, :], mask=live[:, None] & is_value, other=0.0
        )
        rounded = state.to(w.dtype)
        change = u.to(tl.float32) - tl.dot(w, rounded, input_precision="ieee")
        key = mixed_ptr + t[:, None] * CHANNELS + head // (HV // HK) * DK + k_index[None, :]
        q = tl.load(key, mask=live[:, None] & is_key, other=0.0)
        read = tl.dot(q, rounded, input_precision="ieee") * tl.exp(total)[:, None]
        scores = tl.load(
            scores_ptr + unit[:, None] * CHUNK + i[None, :], mask=live[:, None], other=0.0
        )
        read = tl.dot(scores, change.to(w.dtype), read, input_precision="ieee")
        k = tl.load(key + HK * DK, mask=live[:, None] & is_key, other=0.0)
        left = (change * tl.where(live, tl.exp(last - total), 0.0)[:, None]).to(w.dtype)
        state = tl.dot(tl.trans(k), left, state * tl.exp(last), input_precision="ieee")
        column = head * DV + v_index[None, :]
        gate = projected(
            base_ptr,
            delta_ptr,
            t[:, None] * stride + CHANNELS + column,
            live[:, None] & is_value,
            HAS_DELTA,
        )
        inverse = tl.rsqrt(tl.sum(read * read, axis=1) / DV + eps)
        read *= inverse[:, None] * norm[None, :] * gate * tl.sigmoid(gate)
        out = out_ptr + t[:, None] * (HV * DV) + column
        tl.store(out, read.to(w.dtype), mask=live[:, None] & is_value)
    place, there = matrix_places(
        write_ptr + s * num_pages, number, k_index, v_index, DK, DV, PAGE, IS_ALIGNED
    )
    tl.store(arena_ptr + place, state, mask=there)


class _Chunks(NamedTuple):
    """The results of the chunks, for the programs that go from chunk to chunk."""

    u: torch.Tensor
    w: torch.Tensor
    scores: torch.Tensor
    total: torch.Tensor


def _compute_chunks(
    mixed: torch.Tensor,
    given: Projected,
    weights: DeltaWeights,
    inputs: DeltaInputs,
    shape: DeltaShape,
) -> _Chunks:
    base, delta = given
    num_tokens, heads, chunk = len(mixed), shape.num_values, chunk_of(mixed.dtype)

    def empty(width: int) -> torch.Tensor:
        return mixed.new_empty(num_tokens, heads, width)

    total = torch.empty(num_tokens, heads, dtype=torch.float32, device=mixed.device)
    out = _Chunks(empty(shape.value_dim), empty(shape.key_dim), empty(chunk), total)
    assert inputs.chunk_row is not None
    _delta_chunk_kernel[(heads, len(inputs.chunk_row))](
        mixed_ptr=mixed,
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
        rate_ptr=weights.rate,
        shift_ptr=weights.shift,
        u_ptr=out.u,
        w_ptr=out.w,
        scores_ptr=out.scores,
        total_ptr=out.total,
        query_start_ptr=inputs.query_start,
        chunk_row_ptr=inputs.chunk_row,
        chunk_start_ptr=inputs.chunk_start,
        HK=shape.num_keys,
        HV=heads,
        DK=shape.key_dim,
        DV=shape.value_dim,
        HAS_DELTA=delta is not None,
        PRECISION="ieee" if mixed.dtype == torch.float32 else "tf32",
        CHUNK=chunk,
        BLOCK_K=max(16, next_power_of_2(shape.key_dim)),
        BLOCK_V=max(16, next_power_of_2(shape.value_dim)),
        num_warps=4,
    )
    return out


def delta_prefill_triton(
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
) -> None:
    """Mix the sequences with more than one new token; arguments as in `delta_decode_triton`."""
    base, delta = given
    mixed = convolve_triton(given, weights.convolution, arena, inputs, shape, first)
    chunks = _compute_chunks(mixed, given, weights, inputs, shape)
    _delta_prefill_kernel[(shape.num_values, inputs.num_rows)](
        mixed_ptr=mixed,
        base_ptr=base,
        delta_ptr=base if delta is None else delta,
        stride=base.stride(0),
        u_ptr=chunks.u,
        w_ptr=chunks.w,
        scores_ptr=chunks.scores,
        total_ptr=chunks.total,
        norm_ptr=weights.norm,
        out_ptr=out,
        arena_ptr=arena,
        query_start_ptr=inputs.query_start,
        read_ptr=inputs.read,
        write_ptr=inputs.write,
        num_pages=inputs.num_pages,
        first=first + math.prod(shape.window),
        eps=eps,
        HK=shape.num_keys,
        HV=shape.num_values,
        DK=shape.key_dim,
        DV=shape.value_dim,
        PAGE=arena.shape[1],
        IS_ALIGNED=is_aligned(shape, arena.shape[1]),
        HAS_DELTA=delta is not None,
        CHUNK=chunk_of(mixed.dtype),
        BLOCK_K=max(16, next_power_of_2(shape.key_dim)),
        BLOCK_V=max(16, next_power_of_2(shape.value_dim)),
        num_warps=num_warps,
        # In fp32 what is loaded ahead would not fit on a multiprocessor.
        num_stages=2 if mixed.element_size() == 2 else 1,
    )
