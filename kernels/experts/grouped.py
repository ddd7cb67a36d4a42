"""Experts on a GPU: each expert's tokens in tiles of their own, and each weight read once a tile.

A token's experts are added up in the order in which the router ranks them, so that a sum does not
depend on which program ends first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.experts import ExpertShape, ExpertWeights
from kernels.experts.routes import Routes, route_triton


class Tile(NamedTuple):
    """The tile of a program.

    rows     of an expert's tokens
    columns  rows of the weight; of gate and up, half of them each
    depth    bytes of a row of the weight that are loaded at a time
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Shared(NamedTuple):
    """The output of the MLP that all tokens go through.

    made   [T, E]
    delta  [T, E], added to it; None: nothing
    """

    made: torch.Tensor
    delta: torch.Tensor | None = None


@jit()
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens_ptr,
    tiles_ptr,
    height,
    width,
    IS_GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute BLOCK_N columns of a tile; if it is gated, as many of gate, times as many of up."""
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    low = tl.load(tile_ptr + 1)
    high = tl.load(tile_ptr + 2)
    if low >= high:
        return
    m = low + tl.arange(0, BLOCK_M)
    live = m < high
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = m
    columns = n
    inside = n < height
    if IS_GATED:
        rows = tl.load(tokens_ptr + m, mask=live, other=0)
        c = tl.arange(0, 2 * BLOCK_N)
        columns = tl.program_id(0) * BLOCK_N + c % BLOCK_N
        inside = columns < height
        columns += c // BLOCK_N * height
        weight_ptr += tl.load(tile_ptr).to(tl.int64) * 2 * height * width
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
    else:
        weight_ptr += tl.load(tile_ptr).to(tl.int64) * height * width
        both = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * width + k[None, :]
    weight_ptrs = weight_ptr + columns[:, None] * width + k[None, :]
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=live[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[:, None], other=0.0)
        else:
            rest = (start + k < width)[None, :]
            x = tl.load(x_ptrs + start, mask=live[:, None] & rest, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=inside[:, None] & rest, other=0.0)
        both = tl.dot(x, tl.trans(weight), both, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
        # Round where the reference rounds.
        gate = gate.to(dtype).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        both = silu * up.to(dtype).to(tl.float32)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * height + n[None, :]
    tl.store(out_ptrs, both.to(dtype), mask=live[:, None] & (n < height)[None, :])


@jit()
def _sum_kernel(
    made_ptr,
    places_ptr,
    shares_ptr,
    x_ptr,
    gate_ptr,
    shared_ptr,
    delta_ptr,
    out_ptr,
    width,
    CHOSEN: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per token."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(CHOSEN):
        place = tl.load(places_ptr + t * CHOSEN + i).to(tl.int64)
        share = tl.load(shares_ptr + t * CHOSEN + i).to(tl.float32)
        made = tl.load(made_ptr + place * width + n, mask=inside & (place >= 0), other=0.0)
        total += share * made.to(tl.float32)
    if HAS_SHARED:
        x = tl.load(x_ptr + t * width + n, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + n, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(tl.sum(x * gate, axis=0).to(dtype).to(tl.float32))
        shared = tl.load(shared_ptr + t * width + n, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA:
            shared += tl.load(delta_ptr + t * width + n, mask=inside, other=0.0).to(tl.float32)
        total += share.to(dtype).to(tl.float32) * shared
    tl.store(out_ptr + t * width + n, total.to(dtype), mask=inside)


def choose_tile(num_pairs: int, num_experts: int, element_size: int) -> Tile:
    """Return the tile for this many pairs of a token and an expert."""
    mean = num_pairs / num_experts
    if num_pairs <= 32:  # few programs have work
        return Tile(16, 64, 256, 4, 4)
    if mean <= 8:
        return Tile(16, 128, 256, 4, 3)
    if mean <= 24 or element_size > 2:
        return Tile(32, 128, 256, 4, 3)
    if mean <= 64:
        return Tile(64, 128, 128, 4, 4)
    return Tile(128, 128 if mean <= 512 else 256, 128, 8, 3)


def _product(
    x: torch.Tensor, weight: torch.Tensor, routes: Routes, tile: Tile, *, is_gated: bool
) -> torch.Tensor:
    """Return [T C, N] of sorted rows: if it is gated, of tokens x [T, K], else of such rows."""
    height, width = weight.shape[1] // (1 + is_gated), weight.shape[2]
    out = torch.empty(routes.tokens.shape[0], height, dtype=x.dtype, device=x.device)
    block_n, block_k = tile.columns // (1 + is_gated), tile.depth // x.element_size()
    _grouped_kernel[(ceil_div(height, block_n), routes.tiles.shape[0])](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        tokens_ptr=routes.tokens,
        tiles_ptr=routes.tiles,
        height=height,
        width=width,
        IS_GATED=is_gated,
        BLOCK_M=tile.rows,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=width % block_k == 0,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def expert_mlp_triton(
    x: torch.Tensor,
    weights: ExpertWeights,
    shape: ExpertShape,
    *,
    slots: torch.Tensor | None = None,
    shared: Shared | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [T, E] contiguous -> `expert_mlp`, and the shared MLP's part by its share, [T, E].

    slots  [T]; tokens with a negative one, which pad a graph's batch, go through no routed expert
    """
    num_tokens, width = x.shape
    tile = tile or choose_tile(num_tokens * shape.chosen, shape.num, x.element_size())
    routes = route_triton(x, weights.router, shape, block_m=tile.rows, slots=slots)
    inner = _product(x, weights.gate_up, routes, tile, is_gated=True)
    made = _product(inner, weights.down, routes, tile, is_gated=False)
    out = torch.empty_like(x)
    block = next_power_of_2(width)
    gate = weights.shared_gate
    assert (gate is None) == (shared is None)
    delta = None if shared is None else shared.delta
    _sum_kernel[(num_tokens,)](
        made_ptr=made,
        places_ptr=routes.places,
        shares_ptr=routes.shares,
        x_ptr=x,
        gate_ptr=x if gate is None else gate,
        shared_ptr=x if shared is None else shared.made,
        delta_ptr=x if delta is None else delta,
        out_ptr=out,
        width=width,
        CHOSEN=shape.chosen,
        HAS_SHARED=shared is not None,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
