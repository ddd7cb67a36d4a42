"""Stacks keep adapters until their room is wanted, and never more than their bound."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.lora.stacks import SITES, Matrix, Shape, Stack, Stacks

WIDTHS = ((24, 32), (24, 16), (24, 16), (32, 24), (24, 40), (24, 40), (40, 24))
SHAPES: tuple[Shape, ...] = ((4,) * 7, (8, 0, 8, 0, 0, 0, 0), (16,) * 7)
NUM_BYTES_EACH = 4 * 4 * sum(in_width + out_width for in_width, out_width in WIDTHS)  # rank 4


def matrices(shape: Shape, value: float) -> list[list[Matrix]]:
    return [
        [(torch.full((rank, i), value), torch.full((rank, o), value), 1.0)] if rank else []
        for rank, (i, o) in zip(shape, WIDTHS, strict=True)
    ]


def holds(stack: Stack, slot: int, value: float) -> bool:
    return all(bool((tensor[slot] == value).all()) for tensor in (*stack.a, *stack.b))


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_and_nothing_is_mixed_up(seed: int) -> None:
    choose = random.Random(seed)
    stacks = Stacks(widths=WIDTHS, num_layers=1, max_bytes=9 * NUM_BYTES_EACH)
    shape_of = {value: choose.choice(SHAPES) for value in range(20)}
    for _ in range(100):
        running = choose.sample(range(20), choose.randrange(1, 6))
        before = {key for key in running if stacks.find(key)}
        for value in running:
            if stacks.find(value) is None:
                stacks.add(value, shape_of[value], matrices(shape_of[value], value), running)
        assert stacks.num_bytes() <= 9 * NUM_BYTES_EACH
        assert all(stacks.find(key) for key in before), "a running adapter gave way"
        for key in stacks.keys():
            stack = stacks.find(key)
            assert stack is not None
            assert isinstance(key, int)
            assert holds(stack, stack.slot(key), key)


def test_the_least_recently_used_gives_way() -> None:
    stacks = Stacks(widths=WIDTHS, num_layers=1, max_bytes=4 * NUM_BYTES_EACH)
    for value in range(4):
        stacks.add(value, SHAPES[0], matrices(SHAPES[0], value), ())
    stacks.find(0)
    stacks.add(4, SHAPES[0], matrices(SHAPES[0], 4), ())
    assert set(stacks.keys()) == {0, 2, 3, 4}
    stacks.add(5, SHAPES[0], matrices(SHAPES[0], 5), {0, 2, 3, 4})
    assert set(stacks.keys()) == {0, 2, 3, 4}, "there is no room beside those that run"


def test_a_shape_gets_the_room_that_another_keeps_free() -> None:
    stacks = Stacks(widths=WIDTHS, num_layers=1, max_bytes=5 * NUM_BYTES_EACH)
    stacks.add(0, SHAPES[0], matrices(SHAPES[0], 0), ())
    assert stacks.num_bytes() == 4 * NUM_BYTES_EACH
    stacks.add(1, SHAPES[2], matrices(SHAPES[2], 1), {0})
    assert set(stacks.keys()) == {0, 1}
    assert stacks.num_bytes() == 5 * NUM_BYTES_EACH
    stacks.add(2, (256,) * 7, matrices((256,) * 7, 2), ())
    assert set(stacks.keys()) == {0, 1}, "what can never fit drives nobody out"


def test_blocks_cut_every_output_of_a_site() -> None:
    stack = Stack((4, 2, 3, 1, 5, 0, 2), WIDTHS, 1)
    for site, projections in zip(stack.sites, SITES, strict=True):
        assert len(site.blocks) * site.width == sum(WIDTHS[p][1] for p in projections)
        assert sum(rank for _, rank, _ in site.blocks) == site.num_rows
    assert stack.sites[0].blocks == [(0, 4, 0), (0, 4, 4), (4, 2, 8), (6, 3, 10)]
