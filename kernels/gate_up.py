"""The first half of a Llama MLP in one launch: gate, up, their LoRA, SiLU and product.

It is for long prefills, whose speed the GPU's power limits. Intermediate results stay in registers:
1.9 GB less per layer to write and read at 16,384 tokens of Llama-3.1-8B. Tiles go over the rows
band by band, so that a band's x stays in the L2 cache while the weights are read once for it.
"""

from __future__ import annotations

import functools
from typing import TypeGuard

import torch
from torch.nn import functional

from kernels.backend import TensorDescriptor, jit, tl
from kernels.fp8 import Activation, Fp8Matrix, Fp8Rows
from kernels.lora.plan import TILE_T, LoraPlan
from kernels.lora.table import LoraTable
from kernels.silu_mul import silu_mul_ref


def gate_up_silu_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, E], weight [2I, E], gate first -> silu(x gate^T) * (x up^T) [T, I]."""
    return silu_mul_ref(functional.linear(x, weight))


def can_fuse(weight: object, x: Activation) -> TypeGuard[torch.Tensor | Fp8Matrix]:
    """Return whether the kernel supports them: at most 2-byte elements, and a GPU with TMA."""
    if not isinstance(weight, torch.Tensor):
        if not isinstance(weight, Fp8Matrix) or weight.groups is not None:
            return False
    given = x.given if x.fp8 is None else x.fp8.numbers
    if not given.is_cuda:
        return True  # Triton's interpreter
    return given.element_size() <= 2 and _capability(given.device)[0] == 9


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@jit()
def _add_adapters(
    both,
    first,
    num_tokens,
    first_column,
    width,
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    chunks_ptr,
    tile_chunks_ptr,
    layer,
    CHUNK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the adapters' outputs to both [BLOCK_M, 2 BLOCK_N]: gate and up of rows from `first` on.

    A rank block is one product of gate's 16 rank rows and up's, each with its half of the columns.
    With a separate sum for each half, registers are too few and products do not overlap.
    """
    row = first + tl.arange(0, BLOCK_M)
    r = tl.arange(0, 32)
    c = tl.arange(0, 2 * BLOCK_N)
    column = first_column + c % BLOCK_N
    is_own = (r // 16)[:, None] == (c // BLOCK_N)[None, :]
    is_own = is_own & (column < width)[None, :]
    chunk = tl.load(tile_chunks_ptr + first // BLOCK_M)
    end = tl.minimum(first + BLOCK_M, num_tokens)
    done = first
    while done < end:  # one segment per iteration
        record = chunks_ptr + chunk.to(tl.int64) * 8
        chunk_row = tl.load(record).to(tl.int32)
        tiles = tl.load(record + 3)
        entry = tl.load(record + 2) + (layer * 8 + 4 + r // 16) * tiles
        blocks = tl.load(record + 4).to(tl.int32)
        h_row = tl.load(record + 5).to(tl.int32)
        start = tl.load(record + 6).to(tl.int32)
        length = tl.load(record + 7).to(tl.int32)
        token = row - start
        live = ((token >= 0) & (token < length))[:, None]
        before = token // CHUNK_T * CHUNK_T  # the segment's tokens before the token's own chunk
        count = tl.minimum(length - before, CHUNK_T)
        h_at = h_row + (before - (chunk_row - start)) * blocks + token - before
        for block in tl.range(0, blocks, num_stages=1):  # more stages take more registers
            tile = block * 2 + r % 16 // 8
            offset = tl.load(b_offset_ptr + entry + tile, mask=tile < tiles, other=-1)
            height = tl.load(rows_ptr + entry + tile, mask=tile < tiles, other=0)
            has = (offset >= 0) & (r % 8 < height)
            offset = tl.multiple_of(tl.where(has, offset, 0), 8) + (r % 8) * width
            h_ptrs = h_ptr + (h_at + block * count)[:, None] * 32 + r[None, :]
            h = tl.load(h_ptrs, mask=live, other=0.0)
            b_ptrs = (arena_ptr + offset)[:, None] + column[None, :]
            b = tl.load(b_ptrs, mask=has[:, None] & is_own, other=0.0).to(h.dtype)
            both = tl.dot(h, b, both, input_precision="ieee")
        done = start + length
        chunk += tl.cdiv(done - chunk_row, CHUNK_T)
    return both


@jit()
def _scale(
    both,
    first,
    num_tokens,
    first_column,
    width,
    row_scale_ptr,
    column_scale_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply both [BLOCK_M, 2 BLOCK_N], a product of FP8 numbers, by its scales."""
    row = first + tl.arange(0, BLOCK_M)
    c = tl.arange(0, 2 * BLOCK_N)
    column = first_column + c % BLOCK_N
    place = column + c // BLOCK_N * width
    rows = tl.load(row_scale_ptr + row, mask=row < num_tokens, other=0.0)
    columns = tl.load(column_scale_ptr + place, mask=column < width, other=0.0)
    return both * rows[:, None] * columns[None, :]


@jit("num_tokens", "layer")
def _gate_up_kernel(
    x_desc,
    weight_desc,
    out_desc,
    h_ptr,
    arena_ptr,
    b_offset_ptr,
    rows_ptr,
    chunks_ptr,
    tile_chunks_ptr,
    row_scale_ptr,
    column_scale_ptr,
    num_tokens,
    width,
    in_width,
    layer,
    HAS_LORA: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    CHUNK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    num_m = tl.cdiv(num_tokens, BLOCK_M)
    num_n = tl.cdiv(width, BLOCK_N)
    # Flattened with the inner loop, a tile's first loads start before the tile before it ends. With
    # adapters, the compiler would then let no tensor core product start before the last one ends.
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=not HAS_LORA):
        band = tile // (BAND * num_n)
        height = tl.minimum(num_m - band * BAND, BAND)
        m = band * BAND + tile % (BAND * num_n) % height
        n = tile % (BAND * num_n) // height
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(in_width, BLOCK_K)):
            x = x_desc.load([m * BLOCK_M, k * BLOCK_K])
            weight = weight_desc.load([0, n * BLOCK_N, k * BLOCK_K])
            weight = weight.reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x, weight.T, both, input_precision="ieee")
        if HAS_SCALES:
            both = _scale(
                both,
                m * BLOCK_M,
                num_tokens,
                n * BLOCK_N,
                width,
                row_scale_ptr,
                column_scale_ptr,
                BLOCK_M,
                BLOCK_N,
            )
        if HAS_LORA:
            both = _add_adapters(
                both,
                m * BLOCK_M,
                num_tokens,
                n * BLOCK_N,
                width,
                h_ptr,
                arena_ptr,
                b_offset_ptr,
                rows_ptr,
                chunks_ptr,
                tile_chunks_ptr,
                layer,
                CHUNK_T,
                BLOCK_M,
                BLOCK_N,
            )
        # With this order of the axes each thread has the same columns of both: no exchange.
        gate, up = tl.split(both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        # Round where the reference rounds.
        dtype = out_desc.dtype
        gate = gate.to(dtype).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        out_desc.store([m * BLOCK_M, n * BLOCK_N], (silu * up.to(dtype).to(tl.float32)).to(dtype))


def gate_up_silu_triton(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor | Fp8Matrix,
    *,
    h: torch.Tensor | None = None,
    arena: torch.Tensor | None = None,
    table: LoraTable | None = None,
    plan: LoraPlan | None = None,
    layer: int = 0,
    num_programs: int | None = None,
    block_n: int = 128,
    block_k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    band: int = 16,
    num_warps: int = 8,
    num_stages: int = 3,
) -> torch.Tensor:
    """x [T, E], weight [2I, E] -> [T, I], with the adapters of `plan` if h is given.

    h  the shrink over (gate, up); every row must then belong to a segment of the plan
    dtype  of the output where x is in FP8
    """
    scales = None
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Matrix)
        scales, x, weight = (x.scale, weight.scale), x.numbers, weight.numbers
    else:
        assert isinstance(weight, torch.Tensor)
        dtype = x.dtype
    block_k = block_k or 128 // x.element_size()
    num_tokens, width = x.shape[0], weight.shape[0] // 2
    out = torch.empty(num_tokens, width, dtype=dtype, device=x.device)
    parts = weight.view(2, width, x.shape[1])
    _gate_up_kernel[(num_programs or _num_processors(x.device),)](
        x_desc=TensorDescriptor.from_tensor(x, [TILE_T, block_k]),
        weight_desc=TensorDescriptor.from_tensor(parts, [2, block_n, block_k]),
        out_desc=TensorDescriptor.from_tensor(out, [TILE_T, block_n]),
        h_ptr=x if h is None else h,
        arena_ptr=x if arena is None else arena,
        b_offset_ptr=x if table is None else table.b_offset,
        rows_ptr=x if table is None else table.rows,
        chunks_ptr=x if plan is None else plan.chunks,
        tile_chunks_ptr=x if plan is None else plan.tile_chunks,
        row_scale_ptr=x if scales is None else scales[0],
        column_scale_ptr=x if scales is None else scales[1],
        num_tokens=num_tokens,
        width=width,
        in_width=x.shape[1],
        layer=layer,
        HAS_LORA=h is not None,
        HAS_SCALES=scales is not None,
        CHUNK_T=0 if plan is None else plan.block_t,
        BLOCK_M=TILE_T,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BAND=band,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
