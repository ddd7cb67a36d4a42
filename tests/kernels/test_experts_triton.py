"""Experts in tiles on a GPU against the reference, with padding and a shared MLP."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from kernels.experts import ExpertShape, ExpertWeights, expert_mlp, route
from kernels.experts.grouped import Shared, Tile, expert_mlp_triton
from kernels.experts.routes import route_triton
from tests.kernels.test_triton import assert_near

E, INNER = 72, 40
SMALL, LARGE = Tile(16, 32, 64, 4, 2), Tile(32, 64, 128, 4, 3)


def make(
    num_tokens: int, shape: ExpertShape, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ExpertWeights]:
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator) / torch.tensor(size[-1]).sqrt()
        return drawn.to(dtype).to(device)

    num, inner = shape.num, shape.inner
    gate = draw(1, E) if shape.has_shared else None
    stacks = draw(num, 2 * inner, E), draw(num, E, inner)
    return 4 * draw(num_tokens, E), ExpertWeights(4 * draw(num, E), *stacks, gate)


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("num_tokens", "num", "chosen"), [(1, 7, 3), (40, 5, 1), (37, 20, 4)])
@pytest.mark.parametrize("tile", [SMALL, LARGE, None], ids=["small", "large", "chosen"])
def test_experts(
    tile: Tile | None,
    num_tokens: int,
    num: int,
    chosen: int,
    is_normed: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    shape = ExpertShape(num, chosen, INNER, is_normed)
    x, weights = make(num_tokens, shape, dtype, device)
    expected = expert_mlp(x, weights, shape)
    assert_near(expert_mlp_triton(x, weights, shape, tile=tile), expected, dtype)


@pytest.mark.parametrize("has_delta", [True, False])
def test_a_shared_mlp_and_padding(has_delta: bool, dtype: torch.dtype, device: str) -> None:
    """Padding has of the shared MLP alone, and changes nobody else's sum."""
    shape = ExpertShape(6, 3, INNER, has_shared=True)
    x, weights = make(21, shape, dtype, device)
    made, delta = torch.randn(2, 21, E).to(dtype).to(device)
    slots = torch.arange(21, device=device)
    slots[[0, 7, 20]] = -1
    x[7] = float("nan")
    shared = Shared(made, delta if has_delta else None)
    out = expert_mlp_triton(x, weights, shape, slots=slots, shared=shared, tile=SMALL)
    assert weights.shared_gate is not None
    share = linear(x, weights.shared_gate).sigmoid()
    beside = share * (made + delta if has_delta else made)
    routed = expert_mlp(x, weights, shape)
    routed[slots < 0] = 0
    live = torch.arange(21, device=device) != 7
    assert_near(out[live], (routed + beside)[live], dtype)


@pytest.mark.parametrize("num_tokens", [3, 50, 1100])
def test_pairs_are_sorted_by_expert(num_tokens: int, device: str) -> None:
    shape = ExpertShape(9, 2, INNER, is_normed=True)
    x, weights = make(num_tokens, shape, torch.float32, device)
    routes = route_triton(x, weights.router, shape, block_m=16)
    shares, chosen = route(x, weights.router, shape)
    torch.testing.assert_close(routes.shares, shares)
    order = chosen.flatten().argsort(stable=True)
    assert torch.equal(routes.tokens.long(), order // 2)
    assert torch.equal(routes.places.flatten()[order].long(), torch.arange(len(order)).to(device))
    rows = [
        (expert, row)
        for expert, low, high in routes.tiles.tolist()
        for row in range(low, high)
        if high - low <= 16
    ]
    assert rows == list(zip(chosen.flatten()[order].tolist(), range(len(order)), strict=True))


def test_numbers_that_overflowed_stay_with_their_token(device: str) -> None:
    shape = ExpertShape(6, 3, INNER, is_normed=True)
    x, weights = make(20, shape, torch.float32, device)
    expected = expert_mlp(x, weights, shape)
    x[4] = float("nan")
    out = expert_mlp_triton(x, weights, shape)
    assert out[4].isnan().all()
    others = torch.arange(20, device=device) != 4
    assert_near(out[others], expected[others], torch.float32)
