"""Paged attention of one new token per sequence, the context split over programs.

A program takes one sequence, one KV head with all its query heads, and a part of the context. If a
context has several parts, each writes (output, maximum, sum) to a workspace, and the last program
to finish combines them in order: no second launch, and the same bits every time. With a sliding
window, only the window's tokens are read. The last program of a sequence quantises its row, if the
matrix that multiplies it is in FP8.

Source: Flash-Decoding (Dao et al., 2023, https://pytorch.org/blog/flash-decoding/).
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl
from kernels.fp8 import Fp8Rows, quantize_finished
from kernels.kv_pages import PageLayout

# A part shorter than this costs more to combine than it saves (measured on an H200).
MIN_PART = 64


@jit()
def in_kv_type(q):
    """q as the type in which E4M3 keys are multiplied: to float16 a card converts in one step."""
    return q if q.dtype == tl.float32 else q.to(tl.float16)


@jit("layer", "table_stride")
def _decode_kernel(
    q_ptr,
    out_ptr,
    arena_ptr,
    query_start_ptr,
    context_lens_ptr,
    page_tables_ptr,
    table_stride,
    partial_ptr,
    stats_ptr,
    arrived_ptr,
    numbers_ptr,
    row_scale_ptr,
    fixed_ptr,
    finished_ptr,
    scale_log2,
    value_scale,
    page_elems,
    layer_stride,
    value_stride,
    layer,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    WRITES_FP8: tl.constexpr,
    HAS_FIXED: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    GROUP: tl.constexpr = H // K
    s = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(query_start_ptr + s).to(tl.int64)
    num_new = tl.load(query_start_ptr + s + 1) - row
    context = tl.load(context_lens_ptr + s)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    seen = context - begin
    part_width = tl.maximum(tl.cdiv(tl.cdiv(seen, PARTS), BLOCK_N) * BLOCK_N, MIN_PART)
    low = begin + part * part_width
    if (num_new != 1) | (low >= context):
        return
    high = tl.minimum(low + part_width, context)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head_mask = (g < GROUP)[:, None] & (d < D)[None, :]
    heads = row * H + kv_head * GROUP + g
    q = tl.load(q_ptr + heads[:, None] * D + d[None, :], mask=head_mask, other=0.0)
    if IS_FP8:
        q = in_kv_type(q)
    top = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_G,), dtype=tl.float32)
    out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    first = arena_ptr + layer.to(tl.int64) * layer_stride + kv_head * (PAGE * D)
    table = page_tables_ptr + s.to(tl.int64) * table_stride
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < high
        # Looking pages up one block ahead, as the prefill does, takes shared memory, so fewer
        # programs fit on a multiprocessor: 24 -> 30 us at 64 sequences.
        page = tl.load(table + n // PAGE, mask=live, other=0).to(tl.int64)
        token = first + page * page_elems + (n % PAGE) * D
        kv_mask = live[:, None] & (d < D)[None, :]
        k = tl.load(token[:, None] + d[None, :], mask=kv_mask, other=0.0)
        v = tl.load(token[:, None] + value_stride + d[None, :], mask=kv_mask, other=0.0)
        if IS_FP8:
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision="ieee")
        top = new_top
    num_parts = tl.cdiv(seen, part_width)
    is_last = num_parts == 1
    if num_parts > 1:
        unit = s * K + kv_head
        mine = (unit * PARTS + part) * BLOCK_G
        tl.store(partial_ptr + (mine + g)[:, None] * BLOCK_D + d[None, :], out)
        tl.store(stats_ptr + (mine + g) * 2, top)
        tl.store(stats_ptr + (mine + g) * 2 + 1, total)
        tl.debug_barrier()  # all threads have stored their part before one thread counts it
        is_last = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel") == num_parts - 1
        if is_last:
            top = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((BLOCK_G,), dtype=tl.float32)
            out = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
            for other in range(0, num_parts):
                theirs = (unit * PARTS + other) * BLOCK_G + g
                their_top = tl.load(stats_ptr + theirs * 2, cache_modifier=".cg")
                their_total = tl.load(stats_ptr + theirs * 2 + 1, cache_modifier=".cg")
                partial_ptrs = partial_ptr + theirs[:, None] * BLOCK_D + d[None, :]
                new_top = tl.maximum(top, their_top)
                weight = tl.exp2(their_top - new_top)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + their_total * weight
                partial = tl.load(partial_ptrs, cache_modifier=".cg")
                out = out * shrink[:, None] + partial * weight[:, None]
                top = new_top
            tl.store(arrived_ptr + unit, 0)  # for the next launch
    if is_last:
        out = out * value_scale / total[:, None]
        out_ptrs = out_ptr + heads[:, None] * D + d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=head_mask)
        if WRITES_FP8:
            rows = (out_ptr + row * (H * D), numbers_ptr + row * (H * D), row_scale_ptr + row)
            quantize_finished(*rows, fixed_ptr, finished_ptr + s, H * D, K, HAS_FIXED, BLOCK_ROW)


def num_parts(num_sequences: int, layout: PageLayout, device: torch.device) -> int:
    """Return how many programs may share a context: enough to fill a GPU at small batches.

    With keys and values in FP8 more programs fit on a multiprocessor: 94 us after 109 for 32
    sequences of 4,096 tokens on an H200.
    """
    most = 32  # in the interpreter: so that tests split some
    if device.type == "cuda":
        most = 792 if layout.is_fp8 else 528
    parts = max(1, most // max(num_sequences * layout.num_kv_heads, 1))
    return min(32, parts if layout.is_fp8 else next_power_of_2(parts))


def _tile(units: int, is_fp8: bool) -> tuple[int, int, int]:
    """Return (keys read together, warps, stages) for this number of sequences times KV heads.

    Measured on an H200 (8B shape). With many units, small tiles let all of them be under way at
    once: 49 us after 58 at 256 sequences of 160 tokens. With fewer, two warps do better than four:
    106 us after 157 for 32 sequences of 4,096 tokens in FP8. With a few, the time is that of their
    loads: eight warps have more of them under way. Many units in FP8 do best with one warp each: 41
    us after 51.
    """
    if units >= 1024:
        return (32, 1, 3) if is_fp8 else (32, 4, 2)
    return (64, 2, 3) if units > 64 else (64, 8, 2)


class DecodeWorkspace:
    """Scratch memory for split contexts; launches that share one must not overlap.

    So each stream has its own. `arrived` and `finished` are zero between launches.
    """

    def __init__(
        self, num_sequences: int, num_heads: int, layout: PageLayout, device: torch.device
    ) -> None:
        self.parts = num_parts(num_sequences, layout, device)
        group = max(16, next_power_of_2(num_heads // layout.num_kv_heads))
        rows = num_sequences * layout.num_kv_heads * self.parts * group
        self.partial = torch.empty(
            rows, max(16, next_power_of_2(layout.head_dim)), dtype=torch.float32, device=device
        )
        self.stats = torch.empty(rows, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(
            num_sequences * layout.num_kv_heads, dtype=torch.int32, device=device
        )
        self.finished = torch.zeros(num_sequences, dtype=torch.int32, device=device)


def attention_decode_triton(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    quantized: Fp8Rows | None = None,
    fixed: torch.Tensor | None = None,
    block_n: int = 0,
    num_warps: int = 0,
    num_stages: int = 0,
    min_part: int = MIN_PART,
) -> torch.Tensor:
    """Attend for q [T, H, D] of the sequences with one new token -> out [T, H, D].

    Other rows of `out` are not written. A sequence with context 0 is padding. Shapes as in
    `paged_attention_ref`.

    quantized  [T, H D] takes the same rows quantised; None: nobody reads them so
    fixed      [1] the scale of all rows; None: each has its own
    """
    out = torch.empty_like(q) if out is None else out
    num_sequences, num_heads = context_lens.shape[0], q.shape[1]
    key_scale, value_scale = layout.scales_of(layer)
    if workspace is None:
        workspace = DecodeWorkspace(num_sequences, num_heads, layout, q.device)
    tile = _tile(num_sequences * layout.num_kv_heads, layout.is_fp8)
    given = (block_n, num_warps, num_stages)
    block_n, num_warps, num_stages = (mine or its for mine, its in zip(given, tile, strict=True))
    _decode_kernel[(num_sequences, layout.num_kv_heads, workspace.parts)](
        q_ptr=q,
        out_ptr=out,
        arena_ptr=layout.kv(arena),
        query_start_ptr=query_start,
        context_lens_ptr=context_lens,
        page_tables_ptr=page_tables,
        table_stride=page_tables.stride(0),
        partial_ptr=workspace.partial,
        stats_ptr=workspace.stats,
        arrived_ptr=workspace.arrived,
        numbers_ptr=out if quantized is None else quantized.numbers,
        row_scale_ptr=out if quantized is None else quantized.scale,
        fixed_ptr=out if fixed is None else fixed,
        finished_ptr=workspace.finished,
        scale_log2=scale * key_scale * 1.4426950408889634,
        value_scale=value_scale,
        page_elems=layout.page_numbers,
        layer_stride=layout.layer_stride,
        value_stride=layout.value_stride,
        layer=layer,
        H=num_heads,
        K=layout.num_kv_heads,
        D=layout.head_dim,
        PAGE=layout.page_size,
        PARTS=workspace.parts,
        MIN_PART=min_part,
        WINDOW=window or 0,
        BLOCK_G=max(16, next_power_of_2(num_heads // layout.num_kv_heads)),
        BLOCK_D=max(16, next_power_of_2(layout.head_dim)),
        BLOCK_N=block_n,
        IS_FP8=layout.is_fp8,
        WRITES_FP8=quantized is not None,
        HAS_FIXED=fixed is not None,
        BLOCK_ROW=next_power_of_2(num_heads * layout.head_dim),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
