"""The experts that each token goes through, and tokens sorted by expert.

The pairs of a token and an expert are sorted by expert, and by token within one, in two launches.
Nothing waits for the device: there are as many tiles as the shapes allow at most, and those beyond
the last are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl
from kernels.experts import ExpertShape

# Rows of a block of tokens: in a decode, and from _MANY tokens on.
_FEW_ROWS, _MANY_ROWS, _MANY = 16, 64, 1024


class Routes(NamedTuple):
    """Tokens by expert.

    shares  [T, C], like x
    places  [T, C] int32: the row of each pair among all that are sorted; -1: it has none
    tokens  [T C] int32: the token of each sorted row
    tiles   [N, 3] int32: an expert, the first of its rows in this tile, and the first behind
    """

    shares: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    tiles: torch.Tensor


@jit("num_tokens")
def _choose_kernel(
    x_ptr,
    router_ptr,
    slot_ptr,
    shares_ptr,
    chosen_ptr,
    places_ptr,
    counts_ptr,
    num_tokens,
    width,
    NUM: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_NORMED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write shares, experts and, as a pair's place, that among its block's pairs of the expert."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < num_tokens
    e = tl.arange(0, BLOCK_X)
    is_expert = e < NUM
    c = tl.arange(0, BLOCK_C)
    x_rows = x_ptr + t.to(tl.int64)[:, None] * width
    scores = tl.zeros((BLOCK_T, BLOCK_X), dtype=tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        rest = (k < width)[None, :]
        x = tl.load(x_rows + k[None, :], mask=inside[:, None] & rest, other=0.0)
        router_ptrs = router_ptr + e[:, None] * width + k[None, :]
        router = tl.load(router_ptrs, mask=is_expert[:, None] & rest, other=0.0)
        scores = tl.dot(x, tl.trans(router), scores, input_precision="ieee")
    # Round where the reference rounds.
    dtype = shares_ptr.dtype.element_ty
    scores = tl.where(is_expert[None, :], scores.to(dtype).to(tl.float32), float("-inf"))
    powers = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    left = powers / tl.sum(powers, axis=1)[:, None]
    shares = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    chosen = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.int32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(left, axis=1)
        # If all are NaN, the last.
        expert = tl.min(tl.where(left == best[:, None], e[None, :], NUM - 1), axis=1)
        left = tl.where(e[None, :] == expert[:, None], -1.0, left)
        shares = tl.where(c[None, :] == i, best[:, None], shares)
        chosen = tl.where(c[None, :] == i, expert[:, None], chosen)
    if IS_NORMED:
        shares = shares / tl.sum(shares, axis=1)[:, None]
    live = inside
    if HAS_SLOTS:
        live = live & (tl.load(slot_ptr + t, mask=inside, other=-1) >= 0)
    is_chosen = ((left < 0) & live[:, None]).to(tl.int32)
    before = tl.cumsum(is_chosen, axis=0) - is_chosen
    places = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.int32)
    for i in tl.static_range(CHOSEN):
        expert = tl.sum(tl.where(c[None, :] == i, chosen, 0), axis=1)
        place = tl.sum(tl.where(e[None, :] == expert[:, None], before, 0), axis=1)
        places = tl.where(c[None, :] == i, place[:, None], places)
    pairs = t[:, None] * CHOSEN + c[None, :]
    is_pair = inside[:, None] & (c < CHOSEN)[None, :]
    tl.store(shares_ptr + pairs, shares.to(dtype), mask=is_pair)
    tl.store(chosen_ptr + pairs, chosen, mask=is_pair)
    tl.store(places_ptr + pairs, tl.where(live[:, None], places, -1), mask=is_pair)
    counts_ptrs = counts_ptr + tl.program_id(0) * NUM + e
    tl.store(counts_ptrs, tl.sum(is_chosen, axis=0), mask=is_expert)


@jit("num_tokens", "num_blocks", "num_tiles")
def _sort_kernel(
    chosen_ptr,
    places_ptr,
    counts_ptr,
    tokens_ptr,
    tiles_ptr,
    num_tokens,
    num_blocks,
    num_tiles,
    NUM: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write a block's places among all pairs, and its part of the tiles."""
    own = tl.program_id(0)
    e = tl.arange(0, BLOCK_X)
    is_expert = e < NUM
    total = tl.zeros((BLOCK_X,), dtype=tl.int32)
    before = tl.zeros((BLOCK_X,), dtype=tl.int32)
    for first in range(0, num_blocks, 16):
        block = first + tl.arange(0, 16)
        mask = (block < num_blocks)[:, None] & is_expert[None, :]
        counts = tl.load(counts_ptr + block[:, None] * NUM + e[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((block < own)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    starts = ends - total
    t = own * BLOCK_T + tl.arange(0, BLOCK_T)
    for i in tl.static_range(CHOSEN):
        pair = t * CHOSEN + i
        expert = tl.load(chosen_ptr + pair, mask=t < num_tokens, other=0)
        place = tl.load(places_ptr + pair, mask=t < num_tokens, other=-1)
        is_own = e[None, :] == expert[:, None]
        sorted_place = place + tl.sum(tl.where(is_own, (starts + before)[None, :], 0), axis=1)
        tl.store(places_ptr + pair, sorted_place, mask=place >= 0)
        tl.store(tokens_ptr + sorted_place, t, mask=place >= 0)
    heights = tl.cdiv(total, BLOCK_M)
    tile_ends = tl.cumsum(heights, axis=0)
    for first in range(own * 16, num_tiles, tl.num_programs(0) * 16):
        tile = first + tl.arange(0, 16)
        is_before = (tile_ends[None, :] <= tile[:, None]) & is_expert[None, :]
        tile_expert = tl.sum(is_before.to(tl.int32), axis=1)
        is_tiles = e[None, :] == tile_expert[:, None]  # none beyond the last tile
        row = starts[None, :] + (tile[:, None] - (tile_ends - heights)[None, :]) * BLOCK_M
        low = tl.sum(tl.where(is_tiles, row, 0), axis=1)
        high = tl.minimum(low + BLOCK_M, tl.sum(tl.where(is_tiles, ends[None, :], 0), axis=1))
        tl.store(tiles_ptr + tile * 3, tile_expert, mask=tile < num_tiles)
        tl.store(tiles_ptr + tile * 3 + 1, low, mask=tile < num_tiles)
        tl.store(tiles_ptr + tile * 3 + 2, high, mask=tile < num_tiles)


def route_triton(
    x: torch.Tensor,
    router: torch.Tensor,
    shape: ExpertShape,
    *,
    block_m: int,
    slots: torch.Tensor | None = None,
) -> Routes:
    """x [T, E], router [X, E] -> the tokens by expert, in tiles of `block_m` rows.

    slots  [T]; tokens with a negative one, which pad a graph's batch, go through no expert
    """
    num_tokens, (num, width) = x.shape[0], router.shape
    num_pairs = num_tokens * shape.chosen
    touched = min(num, num_pairs)
    num_tiles = touched + (num_pairs - touched) // block_m
    block_t = _FEW_ROWS if num_tokens < _MANY else _MANY_ROWS
    num_blocks = ceil_div(num_tokens, block_t)
    block_x = max(16, next_power_of_2(num))

    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=x.device)

    routes = Routes(
        torch.empty(num_tokens, shape.chosen, dtype=x.dtype, device=x.device),
        ints(num_tokens, shape.chosen),
        ints(num_pairs),
        ints(num_tiles, 3),
    )
    chosen, counts = torch.empty_like(routes.places), ints(num_blocks, num)
    _choose_kernel[(num_blocks,)](
        x_ptr=x,
        router_ptr=router,
        slot_ptr=chosen if slots is None else slots,
        shares_ptr=routes.shares,
        chosen_ptr=chosen,
        places_ptr=routes.places,
        counts_ptr=counts,
        num_tokens=num_tokens,
        width=width,
        NUM=num,
        CHOSEN=shape.chosen,
        IS_NORMED=shape.is_normed,
        HAS_SLOTS=slots is not None,
        BLOCK_T=block_t,
        BLOCK_X=block_x,
        BLOCK_C=next_power_of_2(shape.chosen),
        BLOCK_K=max(16, 256 // x.element_size() * 128 // max(128, block_x)),
        STAGES=4,
        num_warps=4 if block_t == _FEW_ROWS else 8,
    )
    _sort_kernel[(num_blocks,)](
        chosen_ptr=chosen,
        places_ptr=routes.places,
        counts_ptr=counts,
        tokens_ptr=routes.tokens,
        tiles_ptr=routes.tiles,
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        num_tiles=num_tiles,
        NUM=num,
        CHOSEN=shape.chosen,
        BLOCK_T=block_t,
        BLOCK_X=block_x,
        BLOCK_M=block_m,
        num_warps=4,
    )
    return routes
