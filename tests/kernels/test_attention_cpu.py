"""The CPU's planned attention gives what `rope_kv_write` and `paged_attention` give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels import PageLayout
from kernels.attention import paged_attention_ref
from kernels.attention_cpu import CpuAttention
from kernels.rope import rope_kv_write_ref

LAYOUT = PageLayout(num_layers=3, num_kv_heads=2, head_dim=8)
NUM_HEADS = 6
MAX_POSITIONS = 200


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 5), (1, 5), (1, 40)],
        [(1, 16), (1, 17), (1, 190), (1, 3)],
        [(7, 7)],
        [(5, 33), (1, 20), (20, 20), (1, 1)],
        [(2, 2), (3, 160)],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "windows", [(), (None, 1, 17), (33, None, 160)], ids=["all", "small", "large"]
)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
def test_equals_the_references(
    rows: list[tuple[int, int]], windows: tuple[int | None, ...], has_sinks: bool
) -> None:
    """rows: (new tokens, context) of each sequence; foreign pages hold NaN."""
    torch.manual_seed(0)
    arena = torch.full((60, LAYOUT.page_elems), float("nan"))
    pages = torch.randperm(59) + 1
    tables = torch.zeros(len(rows), 13, dtype=torch.int32)
    first = 0
    positions, slots = [], []
    for s, (num_new, context) in enumerate(rows):
        num_pages = -(-context // 16)
        tables[s, :num_pages] = pages[first : first + num_pages]
        first += num_pages
        for position in range(context):
            page, offset = int(tables[s, position // 16]), position % 16
            tokens = arena.view(60, 3, 2, 2, 16, 8)[page, :, :, :, offset]
            tokens.copy_(torch.randn_like(tokens))
            if position >= context - num_new:
                positions.append(position)
                slots.append(16 * page + offset)
    angles = torch.rand(MAX_POSITIONS, LAYOUT.head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    starts = torch.tensor([0, *(n for n, _ in rows)]).cumsum(0).int()
    given = {
        "query_start": starts,
        "context_lens": torch.tensor([context for _, context in rows], dtype=torch.int32),
        "page_tables": tables,
    }
    other = arena.clone()
    attention = CpuAttention(
        ropes=[SimpleNamespace(cos=cos, sin=sin, pairs=None)] * LAYOUT.num_layers,
        arena=arena,
        layout=LAYOUT,
        num_heads=NUM_HEADS,
        windows=windows,
    )
    place = {"positions": torch.tensor(positions), "slots": torch.tensor(slots)}
    step = attention.plan(**place, **given)
    for layer in range(LAYOUT.num_layers):
        heads = torch.randn(len(positions), NUM_HEADS + 4, LAYOUT.head_dim)
        sinks = 2 * torch.randn(NUM_HEADS) if has_sinks else None
        got = step.attend(heads.clone(), layer, sinks)
        q, k, v = heads.split([NUM_HEADS, 2, 2], dim=1)
        q = rope_kv_write_ref(
            q=q, k=k, v=v, cos=cos, sin=sin, arena=other, layout=LAYOUT, layer=layer, **place
        )
        wanted = paged_attention_ref(
            q=q,
            arena=other,
            layout=LAYOUT,
            layer=layer,
            scale=LAYOUT.head_dim**-0.5,
            window=windows[layer] if windows else None,
            sinks=sinks,
            **given,
        )
        assert torch.allclose(got, wanted.flatten(1), atol=1e-5)
        assert torch.allclose(arena, other, atol=1e-6, equal_nan=True)
