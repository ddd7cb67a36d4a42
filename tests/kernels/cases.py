"""Seeded inputs of the kernel tests, and the dense arithmetic their answers are checked with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from kernels import NUM_PROJECTIONS, TILE_ROWS, LoraBatch, LoraTable, PageLayout
from kernels.fp8 import FP8, quantize_tensor


@dataclass
class Adapters:
    """Random adapters in an arena, and the dense A and B they were cut from."""

    arena: torch.Tensor
    table: LoraTable
    a: list[dict[tuple[int, int], torch.Tensor]]  # per adapter: (layer, projection) -> [r, in]
    b: list[dict[tuple[int, int], torch.Tensor]]  # ... -> [r, out]
    scale: list[float]

    def batch(self, segments: list[tuple[int, int]]) -> LoraBatch:
        """segments: (number of tokens, virtual adapter or -1)."""
        lengths = torch.tensor([0, *(n for n, _ in segments)])
        used = [v for _, v in segments if v >= 0]
        num_tiles = self.table.num_tiles.tolist()
        device = self.arena.device
        return LoraBatch(
            table=self.table,
            seg_indptr=lengths.cumsum(0).to(torch.int32).to(device),
            seg_adapter=torch.tensor([v for _, v in segments], dtype=torch.int32, device=device),
            max_tiles=max([num_tiles[v] for v in used], default=0),
        )

    def delta(self, x: torch.Tensor, adapter: int, layer: int, projection: int) -> torch.Tensor:
        """s * (x A^T) B^T in fp32, zero where the adapter has no such projection."""
        key = (layer, projection)
        if adapter < 0 or key not in self.a[adapter]:
            return torch.zeros((), device=x.device)
        a, b = self.a[adapter][key].float(), self.b[adapter][key].float()
        return self.scale[adapter] * ((x.float() @ a.T) @ b)


def make_adapters(
    widths: dict[int, tuple[int, int]],
    ranks: list[int],
    *,
    num_layers: int = 2,
    missing: frozenset[tuple[int, int]] = frozenset(),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Adapters:
    """Adapters of the given ranks over projections {p: (in, out)}.

    missing: (adapter, projection) pairs that the adapter does not change. Everything in the arena
    that no tile owns is NaN. dtype FP8: tiles are numbers in E4M3, and each matrix has a scale.
    """
    generator = torch.Generator().manual_seed(seed)
    chunks: list[torch.Tensor] = [torch.full((24,), float("nan"))]
    size = 24
    a_offsets: list[int] = []
    b_offsets: list[int] = []
    rows: list[int] = []
    scales: list[float] = []
    starts, counts = [], []
    dense_a: list[dict[tuple[int, int], torch.Tensor]] = []
    dense_b: list[dict[tuple[int, int], torch.Tensor]] = []
    for v, rank in enumerate(ranks):
        tiles = -(-rank // TILE_ROWS)
        starts.append(len(rows))
        counts.append(tiles)
        dense_a.append({})
        dense_b.append({})
        for layer in range(num_layers):
            for projection in range(NUM_PROJECTIONS):
                has = projection in widths and (v, projection) not in missing
                if has:
                    n_in, n_out = widths[projection]
                    a = torch.randn(rank, n_in, generator=generator) / n_in**0.5
                    b = torch.randn(rank, n_out, generator=generator)
                    own_scale = 0.5 + v / 4
                    if dtype == FP8:
                        (a, a_scale), (b, b_scale) = quantize_tensor(a), quantize_tensor(b)
                        own_scale *= a_scale * b_scale
                        dense_a[v][layer, projection] = (a.float() * a_scale).to(device)
                        dense_b[v][layer, projection] = (b.float() * b_scale).to(device)
                    else:
                        dense_a[v][layer, projection] = a.to(dtype).to(device)
                        dense_b[v][layer, projection] = b.to(dtype).to(device)
                for t in range(tiles):
                    low, high = t * TILE_ROWS, min((t + 1) * TILE_ROWS, rank)
                    rows.append(high - low if has else 0)
                    scales.append(own_scale if has else 0.0)
                    for offsets, matrix in ((a_offsets, "a"), (b_offsets, "b")):
                        if not has:
                            offsets.append(-1)
                            continue
                        tile = (a if matrix == "a" else b)[low:high]
                        gap = torch.full((-tile.numel() % 8 + 8,), float("nan"))
                        offsets.append(size)
                        chunks += [tile.float().flatten(), gap]
                        size += tile.numel() + gap.numel()
    table = LoraTable(
        entry_start=torch.tensor(starts, dtype=torch.int64, device=device),
        num_tiles=torch.tensor(counts, dtype=torch.int32, device=device),
        a_offset=torch.tensor(a_offsets, dtype=torch.int64, device=device),
        b_offset=torch.tensor(b_offsets, dtype=torch.int64, device=device),
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
        scale=torch.tensor(scales, dtype=torch.float32, device=device),
    )
    arena = torch.cat(chunks).to(dtype).to(device)
    scale = [0.5 + v / 4 for v in range(len(ranks))]
    return Adapters(arena, table, dense_a, dense_b, scale)


@dataclass
class Cache:
    """Sequences in shuffled pages; `k` and `v` are the same values, dense."""

    arena: torch.Tensor
    layout: PageLayout
    page_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    k: list[torch.Tensor]  # per sequence [N, K, D]
    v: list[torch.Tensor]


def make_cache(
    sequences: list[tuple[int, int]],
    *,
    kv_heads: int,
    head_dim: int,
    num_layers: int = 2,
    layer: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    in_fp8: bool = False,
) -> Cache:
    """sequences: (new tokens, context). Slots that hold no token are NaN; table padding is -1.

    in_fp8  keys and values are kept in E4M3, with scales; `k` and `v` are as they were before
    """
    generator = torch.Generator().manual_seed(seed)
    layout = PageLayout(num_layers=num_layers, num_kv_heads=kv_heads, head_dim=head_dim)
    if in_fp8:
        scales = tuple((0.01 + 0.01 * i, 0.02 + 0.005 * i) for i in range(num_layers))
        layout = dataclasses.replace(layout, per_element=dtype.itemsize, scales=scales)
    counts = [-(-context // layout.page_size) for _, context in sequences]
    order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    arena = torch.full((len(order), layout.page_elems), float("nan"))
    if in_fp8:
        arena = torch.full((len(order), layout.page_numbers), 0x7F, dtype=torch.uint8).view(dtype)
    numbers = layout.kv(arena)
    key_scale, value_scale = layout.scales_of(layer)
    view = numbers.view(torch.uint8) if in_fp8 else numbers
    view = view.view(-1, num_layers, 2, kv_heads, layout.page_size, head_dim)
    tables = torch.full((len(sequences), max(counts, default=1)), -1, dtype=torch.int32)
    keys, values = [], []
    for s, (_, context) in enumerate(sequences):
        own = [order.pop() for _ in range(counts[s])]
        tables[s, : len(own)] = torch.tensor(own, dtype=torch.int32)
        k = torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype)
        v = torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype)
        for n in range(context):
            page, offset = own[n // layout.page_size], n % layout.page_size
            key, value = (
                layout.stored(each[n].float(), scale, arena)
                for each, scale in ((k, key_scale), (v, value_scale))
            )
            view[page, layer, 0, :, offset] = key.view(view.dtype)
            view[page, layer, 1, :, offset] = value.view(view.dtype)
        keys.append(k.to(device))
        values.append(v.to(device))
    new = torch.tensor([0, *(n for n, _ in sequences)])
    return Cache(
        arena=arena.to(dtype).to(device),
        layout=layout,
        page_tables=tables.to(device),
        query_start=new.cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor([c for _, c in sequences], dtype=torch.int32, device=device),
        k=keys,
        v=values,
    )
