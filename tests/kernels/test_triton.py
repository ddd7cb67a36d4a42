"""Every Triton kernel against its reference, in the interpreter or on a card.

Outputs are poisoned with NaN before each launch, and inputs hold NaN wherever nothing may be read.
"""

from __future__ import annotations

import pytest
import torch

from kernels.attention import paged_attention_ref
from kernels.attention_decode import DecodeWorkspace, attention_decode_triton
from kernels.attention_prefill import attention_prefill_triton
from kernels.linear import linear_ref, skinny_linear_triton
from kernels.lora.expand import lora_expand_triton
from kernels.lora.expand_decode import lora_expand_decode_triton
from kernels.lora.plan import FEW_TOKENS, make_plan
from kernels.lora.shrink import lora_shrink_triton, row_warps
from kernels.mask_logits import apply_bitmask_ref, apply_bitmask_triton
from kernels.rms_norm import (
    add_rms_norm_ref,
    add_rms_norm_triton,
    rms_norm_ref,
    rms_norm_triton,
)
from kernels.rope import Pairs, rope_kv_write_ref, rope_kv_write_triton
from kernels.sampling import (
    advance_ref,
    advance_triton,
    fill_unread_ref,
    fill_unread_triton,
    greedy_ref,
    greedy_triton,
    mark_ref,
)
from kernels.silu_mul import lora_silu_mul_triton, silu_mul_ref, silu_mul_triton
from tests.kernels.cases import Adapters, Cache, make_adapters, make_cache

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole; NaN never passes."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).norm() / (expected.double().norm() + 1e-9)
    assert error.item() <= TOLERANCE[dtype]


@pytest.mark.parametrize("width", [16, 48, 100])
def test_rms_norm(width: int, dtype: torch.dtype, device: str) -> None:
    x, residual, delta = torch.randn(3, 5, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)

    assert_near(rms_norm_triton(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), dtype)
    for extra in (None, delta):
        normed, total = add_rms_norm_triton(x, residual, weight, 1e-5, extra)
        expected = add_rms_norm_ref(x, residual, weight, 1e-5, extra)
        assert_near(normed, expected[0], dtype)
        assert_near(total, expected[1], dtype)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_silu_mul(is_gelu: bool, dtype: torch.dtype, device: str) -> None:
    gate_up = torch.randn(3, 74, device=device).to(dtype)
    expected = silu_mul_ref(gate_up, is_gelu)
    assert_near(silu_mul_triton(gate_up, is_gelu=is_gelu), expected, dtype)
    delta = torch.randn(3, 74, device=device).to(dtype)
    expected = silu_mul_ref(gate_up + delta, is_gelu)
    assert_near(silu_mul_triton(gate_up, delta, is_gelu), expected, dtype)


MIXES = {
    "base only": ([], [(3, -1), (1, -1)]),
    "one": ([16], [(1, 0)]),
    "ranks": ([4, 1, 27, 64], [(1, 2), (2, 0), (1, -1), (1, 3), (3, 1)]),
    "long segment": ([8, 9], [(21, 1), (0, 0), (2, -1), (17, 0)]),
    "distinct": ([2] * 6, [(1, v) for v in range(6)]),
    "largest": ([256], [(2, 0), (1, -1)]),
    "shared columns": ([40, 100, 136], [(1, 0), (1, 1), (2, -1), (2, 2), (5, 1)]),
}


def _case(
    mix: str, widths: dict[int, tuple[int, int]], dtype: torch.dtype, device: str
) -> tuple[Adapters, list[tuple[int, int]], int]:
    ranks, segments = MIXES[mix]
    missing = frozenset({(1, min(widths))})
    adapters = make_adapters(widths, ranks or [8], missing=missing, dtype=dtype, device=device)
    return adapters, segments, sum(count for count, _ in segments)


def _add_deltas(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: Adapters,
    segments: list[tuple[int, int]],
    columns: dict[int, tuple[int, int]],
) -> torch.Tensor:
    out, row = y.float().clone(), 0
    for count, adapter in segments:
        own = slice(row, row + count)
        for projection, (low, high) in columns.items():
            out[own, low:high] += adapters.delta(x[own], adapter, 1, projection)
        row += count
    return out


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("block_t", "row_k"), [(16, 0), (16, 16), (32, 0)])
def test_shrink_and_expand(
    mix: str, block_t: int, row_k: int, dtype: torch.dtype, device: str
) -> None:
    widths = {0: (40, 48), 1: (40, 24), 2: (40, 24)}
    adapters, segments, num_tokens = _case(mix, widths, dtype, device)
    lora = adapters.batch(segments)
    x = torch.randn(num_tokens, 40, device=device).to(dtype)
    y = torch.randn(num_tokens, 96, device=device).to(dtype)
    expected = _add_deltas(y, x, adapters, segments, {0: (0, 48), 1: (48, 72), 2: (72, 96)})

    plan = make_plan(lora, num_tokens, block_t)
    h = lora_shrink_triton(
        x, adapters.arena, lora.table, plan, 1, (0, 1, 2), num_programs=3, row_k=row_k, splits=2
    )
    assert not plan.arrived.any()
    assert plan.counts[0] == sum(-(-count // block_t) for count, _ in segments)
    args = (h, adapters.arena, lora.table, plan, 1, (0, 1, 2), y, (0, 48, 72, 96))
    if block_t == 16:
        lora_expand_decode_triton(*args, num_programs=3, group_n=64, dot_n=32)
    else:
        lora_expand_triton(*args, num_programs=3, block_n=32)

    assert_near(y, expected, dtype)


@pytest.mark.parametrize("mix", MIXES)
def test_expand_without_add_writes_every_row(mix: str, dtype: torch.dtype, device: str) -> None:
    adapters, segments, num_tokens = _case(mix, {6: (72, 40)}, dtype, device)
    lora = adapters.batch(segments)
    x = torch.randn(num_tokens, 72, device=device).to(dtype)
    y = torch.full((num_tokens, 40), float("nan"), device=device).to(dtype)
    expected = _add_deltas(torch.zeros_like(y), x, adapters, segments, {6: (0, 40)})

    plan = make_plan(lora, num_tokens, 16)
    h = lora_shrink_triton(x, adapters.arena, lora.table, plan, 1, (6,), splits=3)
    lora_expand_triton(h, adapters.arena, lora.table, plan, 1, (6,), y, (0, 40), add=False)

    assert_near(y, expected, dtype)


@pytest.mark.parametrize("rows", [4, 8])
def test_few_tokens_of_many_segments(rows: int, dtype: torch.dtype, device: str) -> None:
    """With the launchers' own options, which then give one or two tokens units of their own."""
    adapters = make_adapters({3: (40, 48)}, [3, 9, 20], dtype=dtype, device=device)
    segments = [(3, 0), *((1 + v % 3 // 2, v % 4 - 1) for v in range(17)), (2, 2), (4, -1), (2, 1)]
    num_tokens = sum(count for count, _ in segments)
    x = torch.randn(num_tokens, 40, device=device).to(dtype)
    y = torch.full((num_tokens, 48), float("nan"), device=device).to(dtype)
    expected = _add_deltas(torch.zeros_like(y), x, adapters, segments, {3: (0, 48)})

    lora = adapters.batch(segments)
    plan = make_plan(lora, num_tokens, 16)
    args = (adapters.arena, lora.table, plan, 1, (3,))
    h = lora_shrink_triton(x, *args, rows=rows)
    lora_expand_triton(h, *args, y, (0, 48), add=False)

    assert row_warps(plan) == 8
    blocks = [-(-rank // 16) for rank in (3, 9, 20)]
    few = sum(blocks[v] for count, v in segments if count <= FEW_TOKENS and v >= 0)
    assert plan.counts[3] == few
    assert_near(y, expected, dtype)


@pytest.mark.parametrize(
    ("mix", "is_gelu"), [("base only", False), ("ranks", True), ("long segment", False)]
)
def test_lora_silu_mul(mix: str, is_gelu: bool, dtype: torch.dtype, device: str) -> None:
    adapters, segments, num_tokens = _case(mix, {4: (24, 40), 5: (24, 40)}, dtype, device)
    lora = adapters.batch(segments)
    x = torch.randn(num_tokens, 24, device=device).to(dtype)
    gate_up = torch.randn(num_tokens, 80, device=device).to(dtype)
    full = _add_deltas(gate_up, x, adapters, segments, {4: (0, 40), 5: (40, 80)})

    plan = make_plan(lora, num_tokens, 16)
    h = lora_shrink_triton(x, adapters.arena, lora.table, plan, 1, (4, 5))
    out = lora_silu_mul_triton(
        gate_up,
        h,
        adapters.arena,
        lora.table,
        plan,
        1,
        is_gelu=is_gelu,
        num_programs=5,
        block_n=32,
    )

    assert_near(out, silu_mul_ref(full, is_gelu), dtype)


@pytest.mark.parametrize(
    "extras",
    [
        "",
        "delta",
        "bias",
        "norm",
        "delta bias norm",
        "still",
        "partial bias",
        "interleaved delta norm",
        "partial interleaved bias norm",
    ],
)
@pytest.mark.parametrize("shape", [(4, 2, 32), (3, 3, 24)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 21])
def test_rope_kv_write(
    num_tokens: int, shape: tuple[int, int, int], extras: str, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, dim = shape
    cache = make_cache([(1, 60)], kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=device)
    positions = torch.randperm(60, device=device)[:num_tokens]
    slots = (cache.page_tables[0, positions // 16] * 16 + positions % 16).long()
    slots[num_tokens // 2 + 1 :][:1] = -1
    angles = torch.randn(64, dim // 2, device=device)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    qkv, delta = torch.randn(2, num_tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    bias = torch.randn((heads + 2 * kv_heads) * dim, device=device).to(dtype)
    norm = torch.randn(2, dim, device=device).to(dtype)
    pairs = Pairs(dim // 2 if "partial" in extras else dim, "interleaved" in extras)
    cos, sin = (None, None) if "still" in extras else (cos, sin)
    full = qkv.float()
    if "delta" in extras:
        full = full + delta.float()
    if "bias" in extras:
        full = full + bias.float()
    arena = cache.arena.clone()

    out = rope_kv_write_triton(
        qkv,
        cos,
        sin,
        positions,
        arena,
        cache.layout,
        1,
        slots,
        num_heads=heads,
        delta=delta if "delta" in extras else None,
        bias=bias if "bias" in extras else None,
        norm=norm if "norm" in extras else None,
        eps=1e-2,
        pairs=pairs,
    )

    live = slots >= 0
    q, k, v = full.view(num_tokens, -1, dim)[live].split((heads, kv_heads, kv_heads), dim=1)
    if "norm" in extras:
        q, k = (
            rms_norm_ref(x, weight.float(), 1e-2) for x, weight in zip((q, k), norm, strict=True)
        )
    q, k = (x[..., pairs.order(dim, torch.device(device))] for x in (q, k))
    wide = cache.arena.float()
    expected_q = rope_kv_write_ref(
        q,
        k,
        v,
        cos,
        sin,
        positions[live],
        wide,
        cache.layout,
        1,
        slots[live],
    )
    assert_near(out[live], expected_q, dtype)
    assert torch.equal(arena.isnan(), wide.isnan())
    assert_near(arena.nan_to_num(), wide.nan_to_num(), dtype)


@pytest.mark.parametrize("contexts", [[1], [33, 16, 0, 7], [300, 64, 65], [1000]], ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 24)], ids=str)
def test_attention_decode(
    contexts: list[int], shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, dim = shape
    sequences = [(1, context) for context in contexts]
    cache = make_cache(sequences, kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=device)
    q = torch.randn(len(contexts), heads, dim, device=device).to(dtype)
    workspace = DecodeWorkspace(len(contexts), heads, cache.layout, q.device)
    args = (
        q,
        cache.arena,
        cache.layout,
        1,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
    )
    expected = paged_attention_ref(*args)
    live = cache.context_lens > 0
    for _ in range(2):  # the workspace is as it was
        out = torch.full_like(q, float("nan"))
        attention_decode_triton(*args, out=out, workspace=workspace, min_part=64, block_n=32)
        assert_near(out[live], expected[live], dtype)
        assert bool((workspace.arrived == 0).all())


def _forget(cache: Cache, window: int) -> None:
    """Put NaN wherever no new token sees: whole pages and the beginning of the first one."""
    size = cache.layout.page_size
    pages = cache.arena.view(len(cache.arena), -1, size, cache.layout.head_dim)
    for s, context in enumerate(cache.context_lens.tolist()):
        num_new = int(cache.query_start[s + 1] - cache.query_start[s])
        for position in range(max(context - num_new + 1 - window, 0)):
            page = int(cache.page_tables[s, position // size])
            pages[page, :, position % size] = float("nan")


@pytest.mark.parametrize("window", [1, 7, 16, 40, 100, 1000])
def test_attention_decode_in_a_window(window: int, dtype: torch.dtype, device: str) -> None:
    contexts = [33, 16, 0, 7, 300, 101]
    cache = make_cache(
        [(1, n) for n in contexts], kv_heads=2, head_dim=24, dtype=dtype, device=device
    )
    q = torch.randn(len(contexts), 6, 24, device=device).to(dtype)
    workspace = DecodeWorkspace(len(contexts), 6, cache.layout, q.device)
    args = (
        q,
        cache.arena,
        cache.layout,
        1,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
    )
    expected = paged_attention_ref(*args, window=window)
    _forget(cache, window)
    live = cache.context_lens > 0
    for _ in range(2):
        out = torch.full_like(q, float("nan"))
        attention_decode_triton(
            *args, window=window, out=out, workspace=workspace, min_part=32, block_n=16
        )
        assert_near(out[live], expected[live], dtype)
        assert bool((workspace.arrived == 0).all())


@pytest.mark.parametrize(
    "sequences",
    [[(5, 5)], [(1, 40), (6, 22), (17, 17), (2, 64)], [(40, 90), (33, 33)]],
    ids=str,
)
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 24)], ids=str)
def test_attention_prefill(
    sequences: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    heads, kv_heads, dim = shape
    cache = make_cache(sequences, kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=device)
    num_tokens = sum(new for new, _ in sequences)
    q = torch.randn(num_tokens, heads, dim, device=device).to(dtype)
    args = (
        q,
        cache.arena,
        cache.layout,
        1,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
    )
    out = torch.full_like(q, float("nan"))
    attention_prefill_triton(
        *args, max_new=max(n for n, _ in sequences), out=out, block_m=32, block_n=32
    )
    assert_near(out, paged_attention_ref(*args), dtype)


@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
@pytest.mark.parametrize("shape", [(4, 4, 16), (6, 2, 24)], ids=str)
def test_attention_prefill_in_a_window(
    window: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, dim = shape
    sequences = [(1, 70), (6, 22), (17, 17), (2, 64), (40, 190)]
    cache = make_cache(sequences, kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=device)
    q = torch.randn(sum(new for new, _ in sequences), heads, dim, device=device).to(dtype)
    args = (
        q,
        cache.arena,
        cache.layout,
        1,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
    )
    expected = paged_attention_ref(*args, window=window)
    out = torch.full_like(q, float("nan"))
    attention_prefill_triton(*args, window=window, max_new=40, out=out, block_m=32, block_n=32)
    assert_near(out, expected, dtype)


def test_prefill_reads_no_block_before_the_window(dtype: torch.dtype, device: str) -> None:
    cache = make_cache([(5, 200)], kv_heads=2, head_dim=16, dtype=dtype, device=device)
    q = torch.randn(5, 4, 16, device=device).to(dtype)
    args = (
        q,
        cache.arena,
        cache.layout,
        1,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
    )
    expected = paged_attention_ref(*args, window=20)
    cache.arena[cache.page_tables[0, :10].long()] = float("nan")  # 16 * 10 < 200 - 5 - 20 + 1
    out = torch.full_like(q, float("nan"))
    attention_prefill_triton(*args, window=20, max_new=5, out=out, block_m=32, block_n=32)
    assert_near(out, expected, dtype)


def test_bitmask(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(4, 77, device=device).to(dtype)
    expected = logits.clone()
    bitmask = torch.randint(-(2**31), 2**31 - 1, (4, 3), dtype=torch.int32, device=device)
    rows = torch.tensor([3, 0], device=device)
    apply_bitmask_ref(expected, bitmask, rows)
    apply_bitmask_triton(logits, bitmask, rows)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("width", [5, 1024, 3001])
def test_greedy(width: int, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(3, width, device=device).to(dtype)
    logits[1, width // 2 :] = logits[1].max() + 1  # a tie: the first wins
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy_triton(logits).tolist() == expected


def test_greedy_marks_what_overflowed(dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(5, 3001, device=device).to(dtype)
    logits[0] = float("nan")
    logits[1, 2000] = float("inf")
    logits[2, 1500] = float("nan")
    logits[3, 7] = float("-inf")
    marked = torch.zeros(5, dtype=torch.int64, device=device)
    token_ids = greedy_triton(logits, marked=marked)
    assert token_ids.tolist() == greedy_ref(logits).tolist()
    assert marked.tolist() == mark_ref(logits, token_ids).tolist()
    assert [token < 0 for token in marked.tolist()] == [True, True, True, False, False]


def test_unread_tokens_are_filled_in(device: str) -> None:
    chosen = torch.tensor([70, 80, 90], device=device)
    token_ids = torch.arange(300, device=device)
    token_ids[[0, 255, 256, 299]] = torch.tensor([~2, ~0, ~1, ~0], device=device)
    expected = token_ids.clone()
    fill_unread_ref(expected, chosen)
    assert expected[[0, 1, 255, 256, 299]].tolist() == [90, 1, 70, 80, 70]
    fill_unread_triton(token_ids, chosen)
    assert token_ids.tolist() == expected.tolist()


def test_advance(device: str) -> None:
    tables = torch.tensor([[7, 3], [5, 0], [9, 9]], dtype=torch.int32, device=device)
    contexts = torch.tensor([16, 3, -1], dtype=torch.int32, device=device)
    positions, slots = torch.full((2, 3), 99, device=device)
    expected = [tensor.clone() for tensor in (contexts, positions, slots)]
    advance_ref(*expected, tables, 16)
    advance_triton(contexts, positions, slots, tables, 16)
    assert contexts.tolist() == [17, 4, -1]
    assert positions.tolist() == [16, 3, 0]
    assert slots.tolist() == [48, 5 * 16 + 3, -1]
    for out, value in zip((contexts, positions, slots), expected, strict=True):
        assert torch.equal(out, value)


@pytest.mark.parametrize("tokens", [1, 5, 17])
def test_skinny_linear(tokens: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(tokens, 72, device=device).to(dtype)
    weight = torch.randn(40, 72, device=device).to(dtype)
    out = skinny_linear_triton(x, weight, block_n=16, block_k=32, num_stages=2)
    assert_near(out, linear_ref(x, weight), dtype)
