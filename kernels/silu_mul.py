"""The gated activation of an MLP, and its fusion with the adapters' gate and up.

SiLU is x sigmoid(x); GELU in its tanh form is x sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.backend import ceil_div, jit, next_power_of_2, num_launched, tl, use_triton
from kernels.fp8 import (
    Fp8Matrix,
    Fp8Rows,
    Scales,
    empty_rows,
    quantize_finished,
    scale_and_quantize,
)
from kernels.lora.expand import tile_rows
from kernels.lora.plan import LoraPlan
from kernels.lora.shrink import load_record
from kernels.lora.table import LoraTable

#: Programs of a row in a short FP8 pass: 3.8 us after 5.2 for a row of 14,336 on an H200, and 4.1
#: after 5.4 for 16; for 64 there is nothing to gain.
PARTS = 8


def silu_mul_ref(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I], or gelu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    if is_gelu:
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


@jit()
def turned(gate, GELU: tl.constexpr):
    """Return what the activation's sigmoid is taken of."""
    if GELU:
        gate = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate


@jit()
def _silu_mul_kernel(
    gate_up_ptr,
    delta_ptr,
    out_ptr,
    width,
    HAS_DELTA: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    place = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + width, mask=mask, other=0.0)
    if HAS_DELTA:
        gate += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
        extra = tl.load(delta_ptr + place + width, mask=mask, other=0.0)
        up = (up.to(tl.float32) + extra.to(tl.float32)).to(up.dtype)
    # Round silu before the product, as the reference does.
    silu = (gate * tl.sigmoid(turned(gate, GELU))).to(up.dtype)
    tl.store(out_ptr + row * width + columns, silu * up, mask=mask)


@jit()
def _silu_mul_fp8_kernel(
    gate_up_ptr,
    delta_ptr,
    out_ptr,
    row_scale_ptr,
    column_scale_ptr,
    numbers_ptr,
    scale_ptr,
    fixed_ptr,
    finished_ptr,
    width,
    HAS_DELTA: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WRITES_OUT: tl.constexpr,
    HAS_FIXED: tl.constexpr,
    GELU: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    """Compute a part of a row. Its scale follows from all of it, so the last part quantises it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = out_ptr.dtype.element_ty
    place = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + width, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        row_scale = tl.load(row_scale_ptr + row)
        gate *= row_scale * tl.load(column_scale_ptr + columns, mask=mask, other=0.0)
        up *= row_scale * tl.load(column_scale_ptr + width + columns, mask=mask, other=0.0)
    if HAS_DELTA:
        gate += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(delta_ptr + place + width, mask=mask, other=0.0).to(tl.float32)
    out = (gate * tl.sigmoid(turned(gate, GELU))).to(dtype) * up.to(dtype)
    if WRITES_OUT or PARTS > 1:
        tl.store(out_ptr + row * width + columns, out, mask=mask)
    if PARTS > 1:
        places = (out_ptr + row * width, numbers_ptr + row * width, scale_ptr + row, fixed_ptr)
        quantize_finished(*places, finished_ptr + row, width, PARTS, HAS_FIXED, BLOCK_ROW)
    else:
        numbers, scale = scale_and_quantize(out.to(tl.float32), fixed_ptr, HAS_FIXED)
        tl.store(numbers_ptr + row * width + columns, numbers, mask=mask)
        tl.store(scale_ptr + row, scale)


@jit("layer")
def _lora_silu_mul_kernel(
    gate_up_ptr,
    row_scale_ptr,
    column_scale_ptr,
    out_ptr,
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    chunks_ptr,
    counts_ptr,
    width,
    layer,
    HAS_SCALES: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, 16)
    num_columns = tl.cdiv(width, BLOCK_N)
    for unit in range(tl.program_id(0), tl.load(counts_ptr) * num_columns, tl.num_programs(0)):
        record = chunks_ptr + (unit // num_columns).to(tl.int64) * 8
        first_row, count, entry, tiles, blocks, h_row = load_record(record)
        columns = (unit % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (columns < width)[None, :]
        live = (t < count)[:, None]
        rows = first_row + t
        gate_ptrs = gate_up_ptr + rows[:, None] * 2 * width + columns[None, :]
        # Loaded first and needed last: the products below run while these arrive.
        gate = tl.load(gate_ptrs, mask=live & inside, other=0.0)
        up = tl.load(gate_ptrs + width, mask=live & inside, other=0.0)
        gate_sum = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        up_sum = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        gate_entry = entry + (layer * 8 + 4) * tiles
        for block in range(0, blocks):
            tile = block * 2 + r // 8
            gate_b, gate_has = tile_rows(gate_entry, tile, tiles, b_offset_ptr, rows_ptr, width)
            up_b, up_has = tile_rows(gate_entry + tiles, tile, tiles, b_offset_ptr, rows_ptr, width)
            h_ptrs = h_ptr + (h_row + block * count + t)[:, None] * 32 + r[None, :]
            gate_h = tl.load(h_ptrs, mask=live, other=0.0)
            up_h = tl.load(h_ptrs + 16, mask=live, other=0.0)
            gate_b_ptrs = arena_ptr + gate_b[:, None] + columns[None, :]
            up_b_ptrs = arena_ptr + up_b[:, None] + columns[None, :]
            gate_rows = tl.load(gate_b_ptrs, mask=gate_has[:, None] & inside, other=0.0)
            gate_rows = gate_rows.to(gate_h.dtype)
            up_rows = tl.load(up_b_ptrs, mask=up_has[:, None] & inside, other=0.0).to(up_h.dtype)
            gate_sum = tl.dot(gate_h, gate_rows, gate_sum, input_precision="ieee")
            up_sum = tl.dot(up_h, up_rows, up_sum, input_precision="ieee")
        dtype = out_ptr.dtype.element_ty
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
        if HAS_SCALES:
            row_scale = tl.load(row_scale_ptr + rows, mask=t < count, other=0.0)[:, None]
            gate_scale = tl.load(column_scale_ptr + columns, mask=columns < width, other=0.0)
            up_scale = tl.load(column_scale_ptr + width + columns, mask=columns < width, other=0.0)
            gate *= row_scale * gate_scale[None, :]
            up *= row_scale * up_scale[None, :]
        gate_sum += gate
        gate = (gate_sum * tl.sigmoid(turned(gate_sum, GELU))).to(dtype)
        up = (up_sum + up).to(dtype)
        tl.store(out_ptr + rows[:, None] * width + columns[None, :], gate * up, mask=live & inside)


def silu_mul_triton(
    gate_up: torch.Tensor, delta: torch.Tensor | None = None, is_gelu: bool = False
) -> torch.Tensor:
    """gate_up [T, 2I] contiguous -> [T, I]; delta, like gate_up, is added to it first."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, next_power_of_2(width))
    _silu_mul_kernel[(num_tokens, ceil_div(width, block))](
        gate_up_ptr=gate_up,
        delta_ptr=gate_up if delta is None else delta,
        out_ptr=out,
        width=width,
        HAS_DELTA=delta is not None,
        GELU=is_gelu,
        BLOCK=block,
        num_warps=4,
    )
    return out


def silu_mul_fp8_triton(
    gate_up: torch.Tensor,
    delta: torch.Tensor | None = None,
    scales: Scales | None = None,
    *,
    reader: Fp8Matrix,
    is_plain: bool = False,
    is_gelu: bool = False,
    finished: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, Fp8Rows]:
    """silu_mul of gate_up [T, 2I] times `scales`, plus `delta`, quantised for `reader`.

    is_plain  whether anybody reads the output unquantised
    finished  [T or more] int32, zero between launches: PARTS programs compute a row; None: one

    -> ([T, I] or None, the same quantised)
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up
    parts = 1 if finished is None else PARTS
    if is_plain or parts > 1:
        out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    rows, fixed = empty_rows(gate_up, width), reader.input_scale
    block = next_power_of_2(ceil_div(width, parts))
    _silu_mul_fp8_kernel[(num_tokens, parts)](
        gate_up_ptr=gate_up,
        delta_ptr=gate_up if delta is None else delta,
        out_ptr=out,
        row_scale_ptr=rows.scale if scales is None else scales.rows,
        column_scale_ptr=rows.scale if scales is None else scales.columns,
        numbers_ptr=rows.numbers,
        scale_ptr=rows.scale,
        fixed_ptr=rows.scale if fixed is None else fixed,
        finished_ptr=rows.scale if finished is None else finished,
        width=width,
        HAS_DELTA=delta is not None,
        HAS_SCALES=scales is not None,
        WRITES_OUT=is_plain,
        HAS_FIXED=fixed is not None,
        GELU=is_gelu,
        PARTS=parts,
        BLOCK=block,
        BLOCK_ROW=next_power_of_2(width),
        num_warps=min(max(block // 512, 1), 32),
    )
    return out if is_plain else None, rows


def lora_silu_mul_triton(
    gate_up: torch.Tensor,
    h: torch.Tensor,
    arena: torch.Tensor,
    table: LoraTable,
    plan: LoraPlan,
    layer: int,
    scales: Scales | None = None,
    *,
    is_gelu: bool = False,
    num_programs: int = 1056,
    block_n: int = 64,
    num_warps: int = 4,
    num_stages: int = 1,
) -> torch.Tensor:
    """silu(gate + adapters' gate) * (up + adapters' up); h is the shrink over (gate, up).

    gate_up is multiplied by its scales first, if there are any.

    For prefills: the adapters' output stays in registers instead of being written and read again.
    Rows that belong to no segment are not written.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(block_n, max(16, next_power_of_2(width)))
    programs = min(
        num_launched(num_programs, h.device), plan.chunks.shape[0] * ceil_div(width, block)
    )
    _lora_silu_mul_kernel[(programs,)](
        gate_up_ptr=gate_up,
        row_scale_ptr=table.scale if scales is None else scales.rows,
        column_scale_ptr=table.scale if scales is None else scales.columns,
        out_ptr=out,
        h_ptr=h,
        arena_ptr=arena,
        b_offset_ptr=table.b_offset,
        rows_ptr=table.rows,
        chunks_ptr=plan.chunks,
        counts_ptr=plan.counts,
        width=width,
        layer=layer,
        HAS_SCALES=scales is not None,
        GELU=is_gelu,
        BLOCK_T=plan.block_t,
        BLOCK_N=block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def silu_mul(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I], or gelu(gate) * up."""
    if use_triton(gate_up):
        return silu_mul_triton(gate_up, is_gelu=is_gelu)
    return silu_mul_ref(gate_up, is_gelu)
