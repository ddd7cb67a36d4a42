"""The gated activation beside its adapters: what those of gate_up add to it is never kept.

Forward   h = silu(gate + scale u_g B_g^T) * (up + scale u_u B_u^T), from the base's gate and up
Backward  dh += du A of the down projection; then the gradients of gate and up, and h once more for
          the gradient of down's A
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, tl, use_triton
from kernels.silu_mul import silu_mul_ref, turned
from kernels.training.lora_torch import lora_back_torch, lora_out_torch
from kernels.training.lora_triton import fit, load_block, load_factor, out_tile
from kernels.training.pools import LoraSite
from kernels.training.segments import Segments
from kernels.training.silu import (
    silu_mul_backward_torch,
    silu_mul_forward,
    slope_of,
)


@jit("num_runs")
def _lora_silu_kernel(
    gate_up_ptr,
    h_ptr,
    u_ptr,
    values_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,
    blocks_ptr,
    num_runs,
    width,
    R: tl.constexpr,
    ALIGNED: tl.constexpr,
    GELU: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(1))
    n, t = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    live, inside, rows = t < count, n < width, first + t
    mask = live[:, None] & inside[None, :]
    places = gate_up_ptr + rows[:, None] * 2 * width + n[None, :]
    gate = tl.load(places, mask=mask, other=0.0)
    up = tl.load(places + width, mask=mask, other=0.0)
    added = out_tile(
        u_ptr, 2 * R, values_ptr, b_ptr, rank_ptr, scale_ptr, segment, rows, live, n, inside,
        R, ALIGNED, RANK_STEP, BLOCK_T, BLOCK_N,
    )  # fmt: skip
    wide = gate.to(tl.float32) + added.to(tl.float32)
    added = out_tile(
        u_ptr + R, 2 * R, values_ptr, b_ptr, rank_ptr, scale_ptr, num_runs + segment, rows, live,
        n, inside, R, ALIGNED, RANK_STEP, BLOCK_T, BLOCK_N,
    )  # fmt: skip
    up = (up.to(tl.float32) + added.to(tl.float32)).to(gate.dtype)
    silu = (wide * tl.sigmoid(turned(wide, GELU))).to(gate.dtype)
    tl.store(h_ptr + rows[:, None] * width + n[None, :], silu * up, mask=mask)


@jit("num_runs")
def _lora_silu_back_kernel(
    gate_up_ptr,
    dh_ptr,
    u_ptr,
    du_ptr,
    values_ptr,
    b_ptr,
    rank_ptr,
    scale_ptr,
    a_ptr,
    down_rank_ptr,
    blocks_ptr,
    num_runs,
    width,
    R: tl.constexpr,
    DOWN_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    GELU: tl.constexpr,
    RANK_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    segment, first, count, _ = load_block(blocks_ptr, tl.program_id(1))
    n, t = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    live, inside, rows = t < count, n < width, first + t
    mask = live[:, None] & inside[None, :]
    places = gate_up_ptr + rows[:, None] * 2 * width + n[None, :]
    dh_places = dh_ptr + rows[:, None] * width + n[None, :]
    dtype = gate_up_ptr.dtype.element_ty
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + width, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_places, mask=mask, other=0.0).to(tl.float32)
    if R > 0:
        added = out_tile(
            u_ptr, 2 * R, values_ptr, b_ptr, rank_ptr, scale_ptr, segment, rows, live, n, inside,
            R, ALIGNED, RANK_STEP, BLOCK_T, BLOCK_N,
        )  # fmt: skip
        gate += added.to(tl.float32)
        added = out_tile(
            u_ptr + R, 2 * R, values_ptr, b_ptr, rank_ptr, scale_ptr, num_runs + segment, rows,
            live, n, inside, R, ALIGNED, RANK_STEP, BLOCK_T, BLOCK_N,
        )  # fmt: skip
        up += added.to(tl.float32)
    if DOWN_R > 0:
        r = tl.arange(0, 16)
        offset, rank = load_factor(a_ptr, down_rank_ptr, segment, ALIGNED, 1)
        du_ptrs = du_ptr + rows[:, None] * DOWN_R + r[None, :]
        a_ptrs = values_ptr + offset + r[:, None] * width + n[None, :]
        has = r < rank
        du = tl.load(du_ptrs, mask=live[:, None] & has[None, :], other=0.0)
        a = tl.load(a_ptrs, mask=has[:, None] & inside[None, :], other=0.0)
        product = tl.dot(du, a, input_precision="ieee")
        if DOWN_R > 16:
            for start in range(16, rank, 16):
                has = start + r < rank
                du = tl.load(du_ptrs + start, mask=live[:, None] & has[None, :], other=0.0)
                a = tl.load(a_ptrs + start * width, mask=has[:, None] & inside[None, :], other=0.0)
                product = tl.dot(du, a, product, input_precision="ieee")
        dh += product.to(dtype).to(tl.float32)
    sigmoid = tl.sigmoid(turned(gate, GELU))
    silu = gate * sigmoid
    d_gate = dh * up * sigmoid * (1 + gate * (1 - sigmoid) * slope_of(gate, GELU))
    tl.store(places, d_gate.to(dtype), mask=mask)
    tl.store(places + width, (dh * silu).to(dtype), mask=mask)
    tl.store(dh_places, silu.to(dtype) * up.to(dtype), mask=mask)


def lora_silu_triton(
    gate_up: torch.Tensor,
    u: torch.Tensor,
    values: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
    *,
    block_t: int = 32,
    block_n: int = 64,
    num_warps: int = 4,
) -> torch.Tensor:
    """As `lora_silu_torch`; all contiguous."""
    width = gate_up.shape[1] // 2
    h = gate_up.new_empty(gate_up.shape[0], width)
    blocks, block_n = segments.blocks(block_t), fit(block_n, width)
    if len(blocks):
        _lora_silu_kernel[(ceil_div(width, block_n), len(blocks))](
            gate_up_ptr=gate_up, h_ptr=h, u_ptr=u, values_ptr=values, b_ptr=site.b,
            rank_ptr=site.rank, scale_ptr=site.scale, blocks_ptr=blocks,
            num_runs=site.rank.shape[1], width=width, R=site.padded_rank, ALIGNED=site.aligned,
            GELU=is_gelu, RANK_STEP=site.rank_step, BLOCK_T=block_t, BLOCK_N=block_n,
            num_warps=num_warps, num_stages=1,
        )  # fmt: skip
    return h


def lora_silu_backward_triton(
    gate_up: torch.Tensor,
    dh: torch.Tensor,
    u: torch.Tensor | None,
    du: torch.Tensor | None,
    values: torch.Tensor,
    site: LoraSite,
    down: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
    *,
    block_t: int = 32,
    block_n: int = 128,
    num_warps: int = 4,
) -> None:
    """As `lora_silu_backward_torch`; all contiguous."""
    width = dh.shape[1]
    blocks, block_n = segments.blocks(block_t), fit(block_n, width)
    if len(blocks):
        _lora_silu_back_kernel[(ceil_div(width, block_n), len(blocks))](
            gate_up_ptr=gate_up, dh_ptr=dh, u_ptr=gate_up if u is None else u,
            du_ptr=gate_up if du is None else du, values_ptr=values, b_ptr=site.b,
            rank_ptr=site.rank, scale_ptr=site.scale, a_ptr=down.a, down_rank_ptr=down.rank,
            blocks_ptr=blocks, num_runs=site.rank.shape[1], width=width,
            R=0 if u is None else site.padded_rank, DOWN_R=0 if du is None else down.padded_rank,
            ALIGNED=site.aligned and down.aligned and width % 8 == 0, GELU=is_gelu,
            RANK_STEP=site.rank_step, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=num_warps,
            num_stages=1,
        )  # fmt: skip


def lora_silu_torch(
    gate_up: torch.Tensor,
    u: torch.Tensor,
    values: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
) -> torch.Tensor:
    """gate_up [T, 2I] of the base, u [T, 2 * padded rank] of its adapters -> h [T, I]."""
    whole = gate_up.clone()
    lora_out_torch(u, values, whole, site, segments)
    return silu_mul_ref(whole, is_gelu)


def lora_silu_backward_torch(
    gate_up: torch.Tensor,
    dh: torch.Tensor,
    u: torch.Tensor | None,
    du: torch.Tensor | None,
    values: torch.Tensor,
    site: LoraSite,
    down: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
) -> None:
    """Turn gate_up [T, 2I] of the base into its gradient, and dh [T, I] into h, in place.

    dh  without the part of down's adapters, whose du [T, padded rank] is; None: there are none
    u   of gate_up's adapters; None: there are none
    """
    if du is not None:
        lora_back_torch(du, values, dh, down, segments)
    if u is not None:
        lora_out_torch(u, values, gate_up, site, segments)
    gradient = silu_mul_backward_torch(gate_up, dh, is_gelu)
    dh.copy_(silu_mul_ref(gate_up, is_gelu))
    gate_up.copy_(gradient)


def lora_silu(
    gate_up: torch.Tensor,
    u: torch.Tensor | None,
    values: torch.Tensor,
    site: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
) -> torch.Tensor:
    """Return the activation of gate_up and its adapters, if any; see `lora_silu_torch`."""
    if u is None:
        return silu_mul_forward(gate_up, is_gelu)
    which = lora_silu_triton if use_triton(gate_up) else lora_silu_torch
    return which(gate_up, u, values, site, segments, is_gelu)


def lora_silu_backward(
    gate_up: torch.Tensor,
    dh: torch.Tensor,
    u: torch.Tensor | None,
    du: torch.Tensor | None,
    values: torch.Tensor,
    site: LoraSite,
    down: LoraSite,
    segments: Segments,
    is_gelu: bool = False,
) -> None:
    """Gradients in place; see `lora_silu_backward_torch`."""
    which = lora_silu_backward_triton if use_triton(gate_up) else lora_silu_backward_torch
    which(gate_up, dh, u, du, values, site, down, segments, is_gelu)
