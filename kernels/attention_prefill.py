"""Paged attention of a chunk of new tokens per sequence: ragged, causal, grouped-query.

A program takes a block of a sequence's new tokens with all query heads of one KV head, so that each
key and value is read once for the group. Source: FlashAttention-2 (arXiv:2307.08691), its online
softmax. With a sliding window, keys before the window of the block's first token are not read.
"""

from __future__ import annotations

import torch

from kernels.attention_decode import in_kv_type
from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.kv_pages import KEYS_READ_TOGETHER, PageLayout


@jit()
def attend_block(scores, v, top, total, out, scale_log2):
    """Add one block of keys to the online softmax: return the new maxima, sums and outputs."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    return new_top, total, out


@jit("layer", "table_stride")
def _prefill_kernel(
    q_ptr,
    out_ptr,
    arena_ptr,
    query_start_ptr,
    context_lens_ptr,
    page_tables_ptr,
    table_stride,
    scale_log2,
    value_scale,
    page_elems,
    layer_stride,
    value_stride,
    layer,
    MIN_NEW: tl.constexpr,
    WINDOW: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    GROUP: tl.constexpr = H // K
    NO_SCORE: tl.constexpr = -1e30  # finite, so that the difference of two is not NaN
    s = tl.program_id(1)
    kv_head = tl.program_id(2)
    start = tl.load(query_start_ptr + s).to(tl.int64)
    num_new = (tl.load(query_start_ptr + s + 1) - start).to(tl.int32)
    context = tl.load(context_lens_ptr + s)
    # Later blocks have more context: they go first, so that short ones fill the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    if (num_new < MIN_NEW) | (first >= num_new) | (context < num_new):
        return
    m = tl.arange(0, BLOCK_Q * GROUP_PAD)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP_PAD
    group = m % GROUP_PAD
    before = context - num_new
    position = before + token
    heads = (start + token) * H + kv_head * GROUP + group
    q_mask = ((token < num_new) & (group < GROUP))[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + heads[:, None] * D + d[None, :], mask=q_mask, other=0.0)
    if IS_FP8:
        q = in_kv_type(q)
    top = tl.full((BLOCK_Q * GROUP_PAD,), NO_SCORE, dtype=tl.float32)
    total = tl.zeros((BLOCK_Q * GROUP_PAD,), dtype=tl.float32)
    out = tl.zeros((BLOCK_Q * GROUP_PAD, BLOCK_D), dtype=tl.float32)
    base = arena_ptr + layer.to(tl.int64) * layer_stride + kv_head * (PAGE * D)
    table = page_tables_ptr + s.to(tl.int64) * table_stride
    d_mask = (d < D)[None, :]
    seen = before + tl.minimum(first + BLOCK_Q, num_new)
    begin = 0
    plain = (before + first + 1) // BLOCK_N * BLOCK_N  # up to here no row needs a causal mask
    if WINDOW > 0:
        position = tl.minimum(position, seen - 1)  # rows past the end attend to some key too
        begin = tl.maximum(before + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        plain = begin
    # The pages of a block are looked up one block ahead: Triton does not prefetch a load that
    # depends on another load of the same iteration.
    n = begin + tl.arange(0, BLOCK_N)
    page = tl.load(table + n // PAGE, mask=n < seen, other=0).to(tl.int64)
    for low in range(begin, plain, BLOCK_N):
        n = low + tl.arange(0, BLOCK_N)
        key = (base + page * page_elems + (n % PAGE) * D)[:, None] + d[None, :]
        page = tl.load(table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < seen, other=0)
        page = page.to(tl.int64)
        k = tl.load(key, mask=d_mask, other=0.0)
        v = tl.load(key + value_stride, mask=d_mask, other=0.0)
        if IS_FP8:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        top, total, out = attend_block(scores, v, top, total, out, scale_log2)
    for low in range(plain, seen, BLOCK_N):
        n = low + tl.arange(0, BLOCK_N)
        live = (n < seen)[:, None] & d_mask
        key = (base + page * page_elems + (n % PAGE) * D)[:, None] + d[None, :]
        page = tl.load(table + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < seen, other=0)
        page = page.to(tl.int64)
        k = tl.load(key, mask=live, other=0.0)
        v = tl.load(key + value_stride, mask=live, other=0.0)
        if IS_FP8:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(n[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        top, total, out = attend_block(scores, v, top, total, out, scale_log2)
    out_ptrs = out_ptr + heads[:, None] * D + d[None, :]
    out = out * value_scale / total[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=q_mask)


def attention_prefill_triton(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    *,
    max_new: int,
    min_new: int = 1,
    window: int | None = None,
    out: torch.Tensor | None = None,
    block_m: int = 128,
    block_n: int = KEYS_READ_TOGETHER,
    num_warps: int = 8,
    num_stages: int = 2,
) -> torch.Tensor:
    """Attend for q [T, H, D] of the sequences with at least `min_new` new tokens -> out [T, H, D].

    max_new is at least the longest chunk. Rows of chunks shorter than min_new are not written, nor
    those of a sequence with context 0. Shapes as in `paged_attention_ref`.
    """
    out = torch.empty_like(q) if out is None else out
    key_scale, value_scale = layout.scales_of(layer)
    group_pad = next_power_of_2(q.shape[1] // layout.num_kv_heads)
    block_q = max(block_m // group_pad, 16 // min(group_pad, 16), 1)
    grid = (ceil_div(max_new, block_q), context_lens.shape[0], layout.num_kv_heads)
    # A few registers are spilled, but two programs fit on a multiprocessor, and the softmax of one
    # runs beside the products of the other.
    is_narrow = num_warps == 8 and q.element_size() < 4 and layout.head_dim <= 128
    limit = {"maxnreg": 128} if is_narrow else {}
    _prefill_kernel[grid](
        q_ptr=q,
        out_ptr=out,
        arena_ptr=layout.kv(arena),
        query_start_ptr=query_start,
        context_lens_ptr=context_lens,
        page_tables_ptr=page_tables,
        table_stride=page_tables.stride(0),
        scale_log2=scale * key_scale * 1.4426950408889634,
        value_scale=value_scale,
        page_elems=layout.page_numbers,
        layer_stride=layout.layer_stride,
        value_stride=layout.value_stride,
        layer=layer,
        MIN_NEW=min_new,
        WINDOW=window or 0,
        H=q.shape[1],
        K=layout.num_kv_heads,
        D=layout.head_dim,
        PAGE=layout.page_size,
        GROUP_PAD=group_pad,
        BLOCK_Q=block_q,
        BLOCK_D=max(16, next_power_of_2(layout.head_dim)),
        BLOCK_N=block_n,
        IS_FP8=layout.is_fp8,
        num_warps=num_warps,
        num_stages=num_stages,
        **limit,
    )
    return out
