"""Rotary position embedding of q and k, and the write of k and v into their pages.

The fused form first adds the adapters' q, k and v: it reads what it would have read anyway, and
one launch instead of two lies on the step's critical path.
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.kv_pages import PageLayout
from kernels.lora import lora_tile
from kernels.lora_plan import LoraPlan
from kernels.lora_table import LoraTable


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rope_kv_write_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k by position, write k and v to their slots, return the rotated q.

    q          [T, H, D]
    k, v       [T, K, D]
    cos, sin   [M, D] fp32   tables by position, the first half repeated (Hugging Face's form)
    positions  [T]
    arena      [P, page_elems], written
    slots      [T] int64     page * B + offset of each token
    -> [T, H, D]
    """
    token_cos = cos[positions].unsqueeze(1).to(q.dtype)
    token_sin = sin[positions].unsqueeze(1).to(q.dtype)
    pages = arena.view(
        -1, layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim
    )[:, layer]  # [P, 2, K, B, D]
    page, offset = slots // layout.page_size, slots % layout.page_size
    pages[page, 0, :, offset] = _rotate(k, token_cos, token_sin).to(arena.dtype)
    pages[page, 1, :, offset] = v.to(arena.dtype)
    return _rotate(q, token_cos, token_sin)


@jit("layer")
def _rope_kernel(
    qkv_ptr,
    qkv_stride,
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
    planes_ptr,
    plane_stride,
    b_offset_ptr,
    rows_ptr,
    chunks_ptr,
    counts_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    HAS_LORA: tl.constexpr,
    SPLITS: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_HALF)
    num_chunks = tl.load(counts_ptr) if HAS_LORA else tl.cdiv(num_tokens, BLOCK_T)
    for unit in range(tl.program_id(0), num_chunks * (H + 2 * K), tl.num_programs(0)):
        chunk = unit // (H + 2 * K)
        head = unit % (H + 2 * K)
        record = chunks_ptr + chunk.to(tl.int64) * 8
        if HAS_LORA:
            first = tl.load(record)
            count = tl.load(record + 1)
        else:
            first = chunk.to(tl.int64) * BLOCK_T
            count = tl.minimum(num_tokens - first, BLOCK_T)
        rows = first + t
        live = t < count
        mask = live[:, None] & (d < HALF)[None, :]
        low_ptrs = qkv_ptr + rows[:, None] * qkv_stride + head * D + d[None, :]
        low = tl.load(low_ptrs, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(low_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
        is_q = head < H
        is_k = (head >= H) & (head < H + K)
        kv_head = tl.where(is_k, head - H, head - H - K)
        if HAS_LORA:
            projection = tl.where(is_q, 0, tl.where(is_k, 1, 2))
            column = tl.where(is_q, head, kv_head) * D + tl.minimum(d, HALF - 1)
            width = tl.where(is_q, H * D, K * D)
            low += lora_tile(
                record,
                planes_ptr + projection * 16,
                plane_stride,
                arena_ptr,
                b_offset_ptr,
                rows_ptr,
                layer,
                column,
                width,
                projection,
                0,
                3,
                BLOCK_T,
                BLOCK_HALF,
                SPLITS,
            )
            high += lora_tile(
                record,
                planes_ptr + projection * 16,
                plane_stride,
                arena_ptr,
                b_offset_ptr,
                rows_ptr,
                layer,
                column + HALF,
                width,
                projection,
                0,
                3,
                BLOCK_T,
                BLOCK_HALF,
                SPLITS,
            )
        if head < H + K:
            position = tl.load(positions_ptr + rows, mask=live, other=0).to(tl.int64)
            angle = position[:, None] * D + d[None, :]
            cos_low = tl.load(cos_ptr + angle, mask=mask, other=0.0)
            sin_low = tl.load(sin_ptr + angle, mask=mask, other=0.0)
            cos_high = tl.load(cos_ptr + angle + HALF, mask=mask, other=0.0)
            sin_high = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0)
            rotated = low * cos_low - high * sin_low
            high = high * cos_high + low * sin_high
            low = rotated
        if is_q:
            out = out_ptr + rows[:, None] * (H * D) + head * D + d[None, :]
            tl.store(out, low.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(out + HALF, high.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            slot = tl.load(slots_ptr + rows, mask=live, other=-1)
            offset = (slot // PAGE) * page_elems + layer * layer_stride + kv_head * (PAGE * D)
            offset += (slot % PAGE) * D + tl.where(is_k, 0, value_stride)
            page = arena_ptr + offset[:, None] + d[None, :]
            writes = mask & (slot >= 0)[:, None]
            tl.store(page, low.to(arena_ptr.dtype.element_ty), mask=writes)
            tl.store(page + HALF, high.to(arena_ptr.dtype.element_ty), mask=writes)


def rope_kv_write_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    slots: torch.Tensor,
    *,
    num_heads: int,
    planes: torch.Tensor | None = None,
    table: LoraTable | None = None,
    plan: LoraPlan | None = None,
    num_programs: int = 0,
) -> torch.Tensor:
    """The kernel on rows of q, k and v side by side.

    qkv     [T, (H + 2 K) D]
    slots   [T] int64; -1: a padding row, nothing is written
    planes  from lora_shrink_triton over (q, k, v); with it, `table` and `plan`
    -> [T, H, D]
    """
    num_tokens, dim = qkv.shape[0], layout.head_dim
    out = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    has_lora = planes is not None and plan is not None and table is not None
    block_t = plan.block_t if plan is not None else 16
    units = (num_heads + 2 * layout.num_kv_heads) * (
        plan.chunks.shape[0] if plan is not None else ceil_div(num_tokens, block_t)
    )
    _rope_kernel[(min(units, num_programs or 132 * 16),)](
        qkv_ptr=qkv,
        qkv_stride=qkv.stride(0),
        out_ptr=out,
        cos_ptr=cos,
        sin_ptr=sin,
        positions_ptr=positions,
        slots_ptr=slots,
        arena_ptr=arena,
        page_elems=layout.page_elems,
        layer_stride=layout.layer_stride,
        value_stride=layout.value_stride,
        num_tokens=num_tokens,
        layer=layer,
        planes_ptr=planes if planes is not None else cos,
        plane_stride=planes.stride(0) if planes is not None else 0,
        b_offset_ptr=table.b_offset if table is not None else slots,
        rows_ptr=table.rows if table is not None else slots,
        chunks_ptr=plan.chunks if plan is not None else slots,
        counts_ptr=plan.counts if plan is not None else slots,
        H=num_heads,
        K=layout.num_kv_heads,
        D=dim,
        PAGE=layout.page_size,
        BLOCK_T=block_t,
        BLOCK_HALF=max(16, next_power_of_2(dim // 2)),
        HAS_LORA=has_lora,
        SPLITS=planes.shape[0] if planes is not None else 1,
        num_warps=4 if has_lora else 2,
        num_stages=1,
    )
    return out


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
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
