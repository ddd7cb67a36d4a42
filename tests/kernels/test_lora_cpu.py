"""The CPU's stacks give what `lora_shrink` and `lora_expand` give."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from kernels import NUM_PROJECTIONS, LoraBatch, LoraTable
from kernels.lora.apply import lora_expand, lora_shrink
from kernels.lora.cpu import CpuLora

WIDTHS = ((24, 32), (24, 16), (24, 16), (32, 24), (24, 40), (24, 40), (40, 24), (0, 0))
SITES = ((0, 1, 2), (3,), (4, 5), (6,))
NUM_LAYERS = 2


def make_adapter(
    choose: random.Random, arena: torch.Tensor, cursor: list[int], ranks: list[int]
) -> list[list[tuple[int, int, int, float]]]:
    """Per entry its tiles (a, b, rows, scale); some neighbours, some apart."""
    entries = []
    for layer in range(NUM_LAYERS):
        for projection, (in_width, out_width) in enumerate(WIDTHS):
            rank, tiles, scale = ranks[projection], [], choose.choice([0.5, 2.0])
            if layer == 1 and choose.random() < 0.3:
                rank = 0
            places: list[list[int]] = [[], []]
            sizes = [min(8, rank - first) for first in range(0, rank, 8)]
            for side, width in enumerate((in_width, out_width)):
                for rows in sizes:
                    cursor[0] += choose.choice([0, 0, 5])
                    places[side].append(cursor[0])
                    cursor[0] += rows * width
            tiles = [(a, b, n, scale) for a, b, n in zip(*places, sizes, strict=True)]
            entries.append(tiles)
    return entries


def make_table(adapters: list[list[list[tuple[int, int, int, float]]]]) -> LoraTable:
    starts, counts, flat = [], [], []
    for adapter in adapters:
        num_tiles = max(len(tiles) for tiles in adapter)
        starts.append(len(flat))
        counts.append(num_tiles)
        for tiles in adapter:
            flat += tiles + [(-1, -1, 0, 0.0)] * (num_tiles - len(tiles))
    a, b, rows, scale = zip(*flat, strict=True)
    return LoraTable(
        entry_start=torch.tensor(starts),
        num_tiles=torch.tensor(counts, dtype=torch.int32),
        a_offset=torch.tensor(a),
        b_offset=torch.tensor(b),
        rows=torch.tensor(rows, dtype=torch.int32),
        scale=torch.tensor(scale),
    )


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's; what is multiplied and how depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("max_bytes", [1 << 30, 40_000, 0], ids=["stacks", "some", "tiles-only"])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 5))]
)
def test_equals_the_kernels_references(seed: int, max_bytes: int) -> None:
    """Over several steps in which adapters come, go, repeat and bring one or many rows."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    arena = torch.randn(60, 2048)
    cursor = [0]
    shapes = [[4] * 7, [4] * 7, [8, 0, 8, 0, 0, 0, 0], [19, 3, 3, 1, 2, 9, 11], [4] * 7]
    shapes = [[*ranks, 0] for ranks in shapes]
    adapters = [make_adapter(choose, arena, cursor, ranks) for ranks in shapes]
    cpu = CpuLora(arena=arena, widths=WIDTHS, num_layers=NUM_LAYERS, max_bytes=max_bytes)
    for _ in range(6):
        present = choose.sample(range(5), choose.randrange(1, 6))
        forgotten = choose.randrange(5)
        cpu.forget(lambda key, forgotten=forgotten: key == forgotten)
        assert forgotten not in cpu.arrange(range(5))
        order = cpu.arrange(present)
        present.sort(key=lambda key: order.get(key, 99))
        lengths = [choose.choice([1, 1, 2, 8, 9, 20]) for _ in present]
        segments = [*range(len(present)), -1] if choose.random() < 0.5 else [*range(len(present))]
        lengths += [3] * (len(segments) - len(present))
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        batch = LoraBatch(
            table=make_table([adapters[i] for i in present]),
            seg_indptr=bounds.int(),
            seg_adapter=torch.tensor(segments, dtype=torch.int32),
            max_tiles=max(max(len(t) for t in adapters[i]) for i in present),
        )
        step = cpu.prepare(batch, present)
        for layer in range(NUM_LAYERS):
            for site in SITES:
                x = torch.randn(int(bounds[-1]), WIDTHS[site[0]][0])
                offsets = tuple(torch.tensor([0, *(WIDTHS[p][1] for p in site)]).cumsum(0).tolist())
                got = torch.randn(len(x), offsets[-1])
                wanted = got.clone()
                step.add(x, got, layer, site, offsets)
                h = lora_shrink(x, arena, batch, layer, site)
                lora_expand(h, arena, batch, layer, site, wanted, offsets)
                assert torch.allclose(got, wanted, atol=1e-3, rtol=1e-4)
    assert NUM_PROJECTIONS == len(WIDTHS)
