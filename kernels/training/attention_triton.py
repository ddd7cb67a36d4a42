"""Causal attention over packed rows on a GPU, forward and backward, without atomics.

A program has a block of a row's tokens and all the query heads that share a key/value head: these
are one tile's rows, so keys are read once for them, and the sums of their gradients are the
program's own. What a row gets does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.training.segments import Rows

_LOG2_E = 1.4426950408889634
#: What stands for no limit to the tokens that a token sees.
_NO_WINDOW = 1 << 30


@jit()
def _load_tokens(blocks_ptr, index):
    """Load a block's first token, and its row's first token and end."""
    record = blocks_ptr + index * 4
    return tl.load(record), tl.load(record + 1), tl.load(record + 2)


@jit()
def _load_rows(ptr, tokens, heads, stride, d, mask, D: tl.constexpr):
    """One row of D for each pair of token and head."""
    place = tokens.to(tl.int64) * stride + heads * D
    return tl.load(ptr + place[:, None] + d[None, :], mask=mask, other=0.0)


@jit()
def _hide(scores, distance, window, HAS_WINDOW: tl.constexpr):
    """Return the scores, with -1e30 for keys that a token does not see."""
    if HAS_WINDOW:
        return tl.where((distance >= 0) & (distance < window), scores, -1e30)
    return tl.where(distance >= 0, scores, -1e30)


@jit("num_heads", "window")
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    blocks_ptr,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    window,
    scale,
    HAS_WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    first, row_start, row_end = _load_tokens(blocks_ptr, tl.program_id(0))
    kv_head = tl.program_id(1)
    m, d, n = tl.arange(0, BLOCK_T * BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    token, group = first + m // BLOCK_G, m % BLOCK_G
    live = (token < row_end) & (group < G)
    head = kv_head * G + group
    mask = live[:, None] & (d < D)[None, :]
    q = _load_rows(q_ptr, token, head, q_stride, d, mask, D)
    most = tl.full((BLOCK_T * BLOCK_G,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_T * BLOCK_G,), dtype=tl.float32)
    out = tl.zeros((BLOCK_T * BLOCK_G, BLOCK_D), dtype=tl.float32)
    low = tl.maximum(row_start, first - window + 1)
    high = tl.minimum(first + BLOCK_T, row_end)
    for start in range(low, high, BLOCK_N):
        key = start + n
        key_mask = (key < high)[:, None] & (d < D)[None, :]
        k = _load_rows(k_ptr, key, kv_head, k_stride, d, key_mask, D)
        v = _load_rows(v_ptr, key, kv_head, v_stride, d, key_mask, D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = _hide(scores, token[:, None] - key[None, :], window, HAS_WINDOW)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        # Where a token has seen nothing yet, what this gives is multiplied by zero later.
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(most - higher)
        total = total * decay + tl.sum(weights, axis=1)
        out = out * decay[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision="ieee")
        most = higher
    total = tl.where(live, total, 1.0)
    out = out / total[:, None]
    place = (token.to(tl.int64) * num_heads + head) * D
    tl.store(out_ptr + place[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    place = token.to(tl.int64) * num_heads + head
    tl.store(lse_ptr + place, most + tl.log2(total), mask=live)


@jit("num_heads", "window")
def _attention_query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    blocks_ptr,
    dq_stride,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    window,
    scale,
    HAS_WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    first, row_start, row_end = _load_tokens(blocks_ptr, tl.program_id(0))
    kv_head = tl.program_id(1)
    m, d, n = tl.arange(0, BLOCK_T * BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    token, group = first + m // BLOCK_G, m % BLOCK_G
    live = (token < row_end) & (group < G)
    head = kv_head * G + group
    mask = live[:, None] & (d < D)[None, :]
    q = _load_rows(q_ptr, token, head, q_stride, d, mask, D)
    dy = _load_rows(dy_ptr, token, head, num_heads * D, d, mask, D)
    out = _load_rows(out_ptr, token, head, num_heads * D, d, mask, D)
    delta = tl.sum(out.to(tl.float32) * dy.to(tl.float32), axis=1)
    place = token.to(tl.int64) * num_heads + head
    tl.store(delta_ptr + place, delta, mask=live)
    lse = tl.load(lse_ptr + place, mask=live, other=0.0)
    dq = tl.zeros((BLOCK_T * BLOCK_G, BLOCK_D), dtype=tl.float32)
    low = tl.maximum(row_start, first - window + 1)
    high = tl.minimum(first + BLOCK_T, row_end)
    for start in range(low, high, BLOCK_N):
        key = start + n
        key_mask = (key < high)[:, None] & (d < D)[None, :]
        k = _load_rows(k_ptr, key, kv_head, k_stride, d, key_mask, D)
        v = _load_rows(v_ptr, key, kv_head, v_stride, d, key_mask, D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None]
        scores = _hide(scores, token[:, None] - key[None, :], window, HAS_WINDOW)
        weights = tl.exp2(scores)
        d_weights = tl.dot(dy, tl.trans(v), input_precision="ieee")
        d_scores = weights * (d_weights - delta[:, None])
        dq = tl.dot(d_scores.to(k.dtype), k, dq, input_precision="ieee")
    dq *= scale / LOG2_E
    place = token.to(tl.int64) * dq_stride + head * D
    tl.store(dq_ptr + place[:, None] + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)


@jit("num_heads", "window")
def _attention_key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dy_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    blocks_ptr,
    dk_stride,
    dv_stride,
    q_stride,
    k_stride,
    v_stride,
    num_heads,
    window,
    scale,
    HAS_WINDOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    first, _, row_end = _load_tokens(blocks_ptr, tl.program_id(0))
    kv_head = tl.program_id(1)
    m, d, n = tl.arange(0, BLOCK_T * BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    key, group = first + n, m % BLOCK_G
    head = kv_head * G + group
    key_mask = (key < row_end)[:, None] & (d < D)[None, :]
    k = _load_rows(k_ptr, key, kv_head, k_stride, d, key_mask, D)
    v = _load_rows(v_ptr, key, kv_head, v_stride, d, key_mask, D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    # Queries from the first key on, as far as any of these keys is seen.
    for start in range(first, tl.minimum(row_end, first + BLOCK_N - 1 + window), BLOCK_T):
        token = start + m // BLOCK_G
        live = (token < row_end) & (group < G)
        mask = live[:, None] & (d < D)[None, :]
        q = _load_rows(q_ptr, token, head, q_stride, d, mask, D)
        dy = _load_rows(dy_ptr, token, head, num_heads * D, d, mask, D)
        place = token.to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + place, mask=live, other=0.0)
        delta = tl.load(delta_ptr + place, mask=live, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :]
        scores = _hide(scores, token[None, :] - key[:, None], window, HAS_WINDOW)
        weights = tl.exp2(scores)  # 1 for tokens past the row's end, where dy is 0
        dv = tl.dot(weights.to(dy.dtype), dy, dv, input_precision="ieee")
        d_weights = tl.dot(v, tl.trans(dy), input_precision="ieee")
        d_scores = weights * (d_weights - delta[None, :])
        dk = tl.dot(d_scores.to(q.dtype), q, dk, input_precision="ieee")
    dk *= scale / LOG2_E
    place = key.to(tl.int64) * dk_stride + kv_head * D
    tl.store(dk_ptr + place[:, None] + d[None, :], dk.to(dk_ptr.dtype.element_ty), mask=key_mask)
    place = key.to(tl.int64) * dv_stride + kv_head * D
    tl.store(dv_ptr + place[:, None] + d[None, :], dv.to(dv_ptr.dtype.element_ty), mask=key_mask)


#: The widest head that the tiles' sizes are made for.
MAX_HEAD_DIM = 128


def takes_triton(q: torch.Tensor) -> bool:
    """Return whether these kernels take such heads; on a CPU only the interpreter runs them."""
    return q.is_cuda and q.shape[-1] <= MAX_HEAD_DIM


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "q_stride": _stride(q), "k_stride": _stride(k),
        "v_stride": _stride(v), "num_heads": q.shape[1], "scale": scale * _LOG2_E,
        "G": group, "D": dim, "BLOCK_G": next_power_of_2(group),
        "BLOCK_D": max(16, next_power_of_2(dim)),
    }  # fmt: skip


def _stride(x: torch.Tensor) -> int:
    """Elements from a token to the next, whose heads lie side by side."""
    assert x.stride()[1:] == (x.shape[2], 1), "heads must lie side by side"
    return x.stride(0)


def _tokens(sizes: dict[str, Any], rows: int) -> int:
    """Tokens of a tile of `rows` rows, at least 16 rows, as a product needs."""
    group: int = sizes["BLOCK_G"]
    return max(1, rows // group, -(-16 // group))


def attention_forward_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    *,
    block_m: int = 64,
    block_n: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D], k and v [T, K, D], any rows -> [T, H, D], base-2 lse [T, H]."""
    sizes = _sizes(q, k, v, scale)
    block_t = _tokens(sizes, block_m)
    out = q.new_empty(q.shape)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    blocks = rows.blocks(block_t)
    if len(blocks):
        _attention_kernel[(len(blocks), k.shape[1])](
            out_ptr=out, lse_ptr=lse, blocks_ptr=blocks,
            window=window or _NO_WINDOW, HAS_WINDOW=window is not None, BLOCK_T=block_t,
            BLOCK_N=block_n,
            num_warps=num_warps, num_stages=num_stages, **sizes,
        )  # fmt: skip
    return out, lse


def attention_backward_triton(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: Rows,
    scale: float,
    window: int | None,
    *,
    block_m: int = 64,
    block_n: int = 32,
    num_warps: int = 4,
    num_stages: int = 3,
    key_m: int = 64,
    key_n: int = 64,
    key_warps: int = 4,
    key_stages: int = 2,
) -> None:
    """Write the gradients of q, k and v to tensors of their shapes; dy [T, H, D] contiguous."""
    sizes = _sizes(q, k, v, scale)
    dq, dk, dv = gradients
    delta = torch.empty_like(lse)
    common = {
        "dy_ptr": dy, "lse_ptr": lse, "delta_ptr": delta,
        "window": window or _NO_WINDOW,
        "HAS_WINDOW": window is not None, "LOG2_E": _LOG2_E, **sizes,
    }  # fmt: skip
    block_t = _tokens(sizes, block_m)
    blocks, key_blocks = rows.blocks(block_t), rows.blocks(key_n)
    if len(blocks):
        _attention_query_kernel[(len(blocks), k.shape[1])](
            out_ptr=out,
            dq_ptr=dq,
            dq_stride=_stride(dq),
            blocks_ptr=blocks,
            BLOCK_T=block_t,
            BLOCK_N=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            **common,
        )
        _attention_key_kernel[(len(key_blocks), k.shape[1])](
            dk_ptr=dk, dv_ptr=dv, dk_stride=_stride(dk), dv_stride=_stride(dv),
            blocks_ptr=key_blocks, BLOCK_T=_tokens(sizes, key_m),
            BLOCK_N=key_n, num_warps=key_warps, num_stages=key_stages, **common,
        )  # fmt: skip
