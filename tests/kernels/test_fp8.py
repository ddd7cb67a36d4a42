"""FP8: quantising rows, and the kernels that read FP8 products, against plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.attention import paged_attention_ref, paged_attention_torch
from kernels.attention_decode import DecodeWorkspace, attention_decode_triton
from kernels.attention_prefill import attention_prefill_triton
from kernels.fp8 import (
    FP8,
    Fp8Matrix,
    Fp8Rows,
    Scales,
    apply_scales_triton,
    empty_rows,
    fp8_linear_ref,
    fp8_product,
    quantize_matrix,
    quantize_rows_ref,
    quantize_rows_triton,
)
from kernels.fp8_groups import GROUP, grouped_product_triton
from kernels.gate_up import gate_up_silu_triton
from kernels.linear import skinny_linear_triton
from kernels.lora.apply import lora_expand_ref, lora_shrink_ref
from kernels.lora.expand import lora_expand_triton
from kernels.lora.plan import TILE_T, make_plan
from kernels.lora.shrink import lora_shrink_triton
from kernels.rms_norm import norm_triton, rms_norm_ref
from kernels.rope import rope_kv_write_ref, rope_kv_write_triton
from kernels.silu_mul import lora_silu_mul_triton, silu_mul_fp8_triton, silu_mul_ref
from tests.kernels.cases import make_adapters, make_cache
from tests.kernels.test_triton import assert_near


def assert_same(rows: Fp8Rows, expected: Fp8Rows) -> None:
    """Nearly all numbers are the same; sums in another order may round one to its neighbour."""
    torch.testing.assert_close(rows.scale, expected.scale, rtol=1e-2, atol=0)
    ours, theirs = rows.numbers.float(), expected.numbers.float()
    assert (ours != theirs).float().mean() < 0.15  # bf16 rounds on the way, too
    torch.testing.assert_close(ours, theirs, rtol=0.13, atol=0.002)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_quantize_rows(is_fixed: bool, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5, 48, device=device).to(dtype)
    x[2] = 0
    x[3] *= 1000
    fixed = torch.full((1,), 0.01, device=device) if is_fixed else None
    rows, expected = quantize_rows_triton(x, fixed), quantize_rows_ref(x, fixed)
    assert_same(rows, expected)
    if not is_fixed:
        assert rows.numbers.float().abs().amax(dim=1).tolist() == [448, 448, 0, 448, 448]
        error = (rows.dense() - x.float()).abs() / rows.scale[:, None]
        assert error.max() <= 16.1  # half a step of the numbers from 256 to 448


def test_a_product_with_its_scales_is_the_linear(device: str) -> None:
    x, weight = torch.randn(3, 32, device=device), torch.randn(16, 32, device=device)
    matrix = quantize_matrix(weight)
    expected = fp8_linear_ref(x, matrix)
    product, scales = fp8_product(quantize_rows_triton(x), matrix, torch.bfloat16)
    applied = apply_scales_triton(product.float(), scales)
    torch.testing.assert_close(applied, expected, rtol=1e-2, atol=1e-2)
    bias = torch.randn(16, device=device)
    biased = apply_scales_triton(product.float(), scales, bias)
    torch.testing.assert_close(biased, expected + bias, rtol=1e-2, atol=1e-2)
    assert (expected - x @ weight.T).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("tokens", [3, 64])
def test_the_product_beside_other_kernels_is_the_same(tokens: int, device: str) -> None:
    matrix = quantize_matrix(torch.randn(80, 96, device=device))
    rows = quantize_rows_triton(torch.randn(tokens, 96, device=device))
    expected = rows.numbers.float() @ matrix.numbers.float().T
    out = skinny_linear_triton(
        rows.numbers, matrix.numbers, dtype=torch.float32, block_n=64, block_k=64, num_stages=2
    )
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
    shared, _ = fp8_product(rows, matrix, torch.bfloat16, is_shared=True)
    alone, _ = fp8_product(rows, matrix, torch.bfloat16)
    torch.testing.assert_close(shared, alone, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_rows_and_devices_of_a_matrix(device: str) -> None:
    matrix = quantize_matrix(torch.randn(8, 16))
    moved = matrix.to(device)
    assert torch.equal(moved.rows(2, 5).dense().cpu(), matrix.dense()[2:5])
    assert moved.shape == (8, 16) and moved.numbers.dtype == FP8


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("inputs", ["", "residual", "residual delta", "residual delta fixed"])
def test_norm_of_a_product(inputs: str, is_plain: bool, dtype: torch.dtype, device: str) -> None:
    width = 48
    x, residual, delta = torch.randn(3, 5, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    scales = Scales(torch.rand(5, device=device) + 0.1, torch.rand(width, device=device) + 0.1)
    fixed = torch.full((1,), 0.02, device=device) if "fixed" in inputs else None
    reader = Fp8Matrix(torch.zeros(1, width, device=device), scales.columns, fixed)
    full = x.float()
    if "residual" in inputs:
        full = full * scales.rows[:, None] * scales.columns + residual.float()
    if "delta" in inputs:
        full = full + delta.float()
    normed, total = norm_triton(
        x,
        weight,
        1e-5,
        residual=residual if "residual" in inputs else None,
        delta=delta if "delta" in inputs else None,
        scales=scales if "residual" in inputs else None,
        reader=reader,
        is_plain=is_plain,
    )
    assert_near(total, full, dtype)
    expected = rms_norm_ref(total, weight, 1e-5)
    assert normed.fp8 is not None
    assert_same(normed.fp8, quantize_rows_ref(expected, fixed))
    assert (normed.plain is not None) == is_plain
    if normed.plain is not None:
        assert_near(normed.plain, expected, dtype)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
def test_silu_mul_of_a_product(
    has_delta: bool, is_plain: bool, is_fixed: bool, dtype: torch.dtype, device: str
) -> None:
    gate_up, delta = torch.randn(2, 3, 74, device=device).to(dtype)
    scales = Scales(torch.rand(3, device=device) + 0.1, torch.rand(74, device=device) + 0.1)
    fixed = torch.full((1,), 0.005, device=device) if is_fixed else None
    reader = Fp8Matrix(torch.zeros(1, 37, device=device), scales.columns, fixed)
    full = gate_up.float() * scales.rows[:, None] * scales.columns
    if has_delta:
        full = full + delta.float()
    expected = silu_mul_ref(full).to(dtype)
    finished = torch.zeros(3, dtype=torch.int32, device=device)
    for counters in (None, finished):
        out, rows = silu_mul_fp8_triton(
            gate_up,
            delta if has_delta else None,
            scales,
            reader=reader,
            is_plain=is_plain,
            finished=counters,
        )
        assert_same(rows, quantize_rows_ref(expected, fixed))
        assert (out is not None) == is_plain
        if out is not None:
            assert_near(out, expected, dtype)
    assert not finished.any()


@pytest.mark.parametrize("contexts", [[1], [33, 16, 0, 7], [300, 64, 65]], ids=str)
def test_decodes_over_fp8_pages(contexts: list[int], dtype: torch.dtype, device: str) -> None:
    sequences = [(1, context) for context in contexts]
    made: dict[str, Any] = {"kv_heads": 2, "head_dim": 24, "dtype": dtype, "device": device}
    cache = make_cache(sequences, in_fp8=True, **made)
    plain = make_cache(sequences, **made)
    q = torch.randn(len(contexts), 6, 24, device=device).to(dtype)
    tables = (cache.query_start, cache.context_lens, cache.page_tables, 0.2)
    expected = paged_attention_ref(q, cache.arena, cache.layout, 1, *tables)
    args = (q, cache.arena, cache.layout, 1, *tables)
    workspace, rows = DecodeWorkspace(len(q), 6, cache.layout, q.device), empty_rows(q.flatten(1))
    live = cache.context_lens > 0
    for _ in range(2):  # the workspace is as it was
        out = attention_decode_triton(
            *args, workspace=workspace, quantized=rows, min_part=64, block_n=32
        )
        quantized = Fp8Rows(rows.numbers[live], rows.scale[live])
        assert_same(quantized, quantize_rows_ref(out.flatten(1)[live]))
        assert not workspace.arrived.any() and not workspace.finished.any()
    assert_near(out[live], expected[live], dtype)
    exact = paged_attention_ref(q, plain.arena, plain.layout, 1, *tables)
    assert (expected - exact)[live].norm() / exact[live].norm() < 0.06
    if device == "cpu":
        torched = paged_attention_torch(q, cache.arena, cache.layout, 1, *tables)
        assert_near(torched[live], expected[live], dtype)


@pytest.mark.parametrize("window", [None, 9])
def test_prefills_over_fp8_pages(window: int | None, dtype: torch.dtype, device: str) -> None:
    sequences = [(1, 40), (6, 22), (17, 17), (33, 90)]
    made: dict[str, Any] = {"kv_heads": 2, "head_dim": 24, "dtype": dtype, "device": device}
    cache = make_cache(sequences, in_fp8=True, **made)
    q = torch.randn(sum(new for new, _ in sequences), 6, 24, device=device).to(dtype)
    tables = (cache.query_start, cache.context_lens, cache.page_tables, 0.2)
    args = (q, cache.arena, cache.layout, 1, *tables)
    expected = paged_attention_ref(*args, window=window)
    out = attention_prefill_triton(*args, max_new=33, window=window, block_m=32, block_n=32)
    assert_near(out, expected, dtype)
    if device == "cpu":
        assert_near(paged_attention_torch(*args, window), expected, dtype)


def test_keys_and_values_are_written_in_fp8(dtype: torch.dtype, device: str) -> None:
    """As the reference writes them; what is too large is cut off, not NaN."""
    made: dict[str, Any] = {"kv_heads": 2, "head_dim": 24, "dtype": dtype, "device": device}
    cache = make_cache([(1, 60)], in_fp8=True, **made)
    positions = torch.randperm(60, device=device)[:21]
    slots = (cache.page_tables[0, positions // 16] * 16 + positions % 16).long()
    angles = torch.randn(64, 12, device=device)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    qkv = torch.randn(21, 7 * 24, device=device).to(dtype)
    qkv[3] *= 100
    arena, layout = cache.arena.clone(), cache.layout
    args = (cos, sin, positions, arena, layout, 1, slots)
    out = rope_kv_write_triton(qkv, *args, num_heads=3)
    q, k, v = qkv.view(21, -1, 24).float().split((3, 2, 2), dim=1)
    expected = rope_kv_write_ref(q, k, v, cos, sin, positions, cache.arena, layout, 1, slots)
    assert_near(out, expected, dtype)
    ours, theirs = (layout.kv(each).float() for each in (arena, cache.arena))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert (ours.nan_to_num() != theirs.nan_to_num()).float().mean() < 0.001


@pytest.mark.parametrize(("block_t", "row_k"), [(16, 0), (16, 16), (32, 0)])
def test_adapters_in_fp8(block_t: int, row_k: int, dtype: torch.dtype, device: str) -> None:
    segments = [(1, 2), (2, 0), (1, -1), (1, 3), (3, 1), (19, 2)]
    adapters = make_adapters({0: (40, 48), 1: (40, 24)}, [4, 1, 27, 64], dtype=FP8, device=device)
    lora, num_tokens = adapters.batch(segments), sum(count for count, _ in segments)
    x = torch.randn(num_tokens, 40, device=device).to(dtype)
    y = torch.full((num_tokens, 72), float("nan"), device=device).to(dtype)
    expected, row = torch.zeros(num_tokens, 72, device=device), 0
    for count, adapter in segments:
        own = slice(row, row + count)
        expected[own, :48] += adapters.delta(x[own], adapter, 1, 0)
        expected[own, 48:] += adapters.delta(x[own], adapter, 1, 1)
        row += count
    plan = make_plan(lora, num_tokens, block_t)
    args = (adapters.arena, lora.table, plan, 1, (0, 1))
    h = lora_shrink_triton(x, *args, num_programs=3, row_k=row_k, splits=2)
    lora_expand_triton(h, *args, y, (0, 48, 72), add=False)
    assert_near(y, expected, dtype)
    reference = torch.zeros(num_tokens, 72, device=device)
    h = lora_shrink_ref(x, adapters.arena, lora, 1, (0, 1))
    lora_expand_ref(h, adapters.arena, lora, 1, (0, 1), reference, (0, 48, 72))
    assert_near(reference, expected, torch.float32)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_lora_silu_mul_of_a_product(in_fp8: bool, dtype: torch.dtype, device: str) -> None:
    segments = [(3, 0), (2, -1), (21, 1)]
    own_dtype = FP8 if in_fp8 else dtype
    adapters = make_adapters({4: (24, 40), 5: (24, 40)}, [4, 27], dtype=own_dtype, device=device)
    lora = adapters.batch(segments)
    x = torch.randn(26, 24, device=device).to(dtype)
    gate_up = torch.randn(26, 80, device=device).to(dtype)
    scales = Scales(torch.rand(26, device=device) + 0.1, torch.rand(80, device=device) + 0.1)
    full = gate_up.float() * scales.rows[:, None] * scales.columns
    row = 0
    for count, adapter in segments:
        own = slice(row, row + count)
        for half, projection in ((slice(0, 40), 4), (slice(40, 80), 5)):
            full[own, half] += adapters.delta(x[own], adapter, 1, projection)
        row += count
    plan = make_plan(lora, 26, 16)
    h = lora_shrink_triton(x, adapters.arena, lora.table, plan, 1, (4, 5))
    out = lora_silu_mul_triton(
        gate_up, h, adapters.arena, lora.table, plan, 1, scales, num_programs=5, block_n=32
    )
    assert_near(out, silu_mul_ref(full).to(dtype), dtype)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("segments", [[], [(70, 0), (2, -1), (TILE_T, 1)]], ids=str)
def test_gate_up_silu_in_fp8(segments: list[tuple[int, int]], in_fp8: bool, device: str) -> None:
    """Tensor cores want at least 32 numbers a row."""
    width, inner, num_tokens = 64, 40, sum(count for count, _ in segments) or 131
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    x = torch.randn(num_tokens, width, device=device).to(dtype)
    matrix = quantize_matrix(torch.randn(2 * inner, width, device=device) * 0.3)
    rows = quantize_rows_ref(x)
    full = rows.dense() @ matrix.dense().T
    lora = {}
    if segments:
        widths = {4: (width, inner), 5: (width, inner)}
        own_dtype = FP8 if in_fp8 else dtype
        adapters = make_adapters(widths, [4, 27], dtype=own_dtype, device=device)
        batch = adapters.batch(segments)
        plan = make_plan(batch, num_tokens, 32)
        h = lora_shrink_triton(x, adapters.arena, batch.table, plan, 1, (4, 5))
        lora = {"h": h, "arena": adapters.arena, "table": batch.table, "plan": plan, "layer": 1}
        row = 0
        for count, adapter in segments:
            own = slice(row, row + count)
            full[own, :inner] += adapters.delta(x[own], adapter, 1, 4)
            full[own, inner:] += adapters.delta(x[own], adapter, 1, 5)
            row += count
    sizes = {"num_programs": 3, "block_n": 32, "block_k": 32, "band": 2}
    out = gate_up_silu_triton(rows, matrix, dtype=dtype, **lora, **sizes)
    assert_near(out, silu_mul_ref(full), dtype)


@pytest.mark.parametrize("num_tokens", [1, 19, 150])
def test_a_product_of_groups(num_tokens: int, device: str) -> None:
    """The last group has fewer columns than the others."""
    height, width = 80, 2 * GROUP + 48
    rows = quantize_rows_ref(torch.randn(num_tokens, width, device=device))
    numbers = quantize_rows_ref(torch.randn(height, width, device=device)).numbers
    groups = torch.rand(height, 3, device=device) + 0.1
    matrix = Fp8Matrix(numbers, torch.ones(height, device=device), groups=groups)
    expected = rows.numbers.float() @ matrix.dense().T
    out = grouped_product_triton(rows.numbers, numbers, groups, torch.float32)
    assert_near(out, expected, torch.float16)
    product, scales = fp8_product(rows, matrix, torch.float32)
    applied = apply_scales_triton(product, scales)
    assert_near(applied, rows.dense() @ matrix.dense().T, torch.float16)
    part = matrix.rows(3, 70).to(device)
    assert torch.equal(part.dense(), matrix.dense()[3:70])
