"""The torch forms against Hugging Face's own code and against dense arithmetic.

Everything else in this folder compares a kernel with its reference, so these tests carry the
weight: they are what ties the references to the definition of the model.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels import add_rms_norm, apply_bitmask, paged_attention, rms_norm, rope_kv_write, silu_mul
from kernels.attention import paged_attention_ref
from kernels.lora.apply import lora_expand, lora_shrink
from tests.kernels.cases import make_adapters, make_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_hugging_faces(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(48).to(dtype)
    x, residual = torch.randn(2, 7, 48).to(dtype)

    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    normed, total = add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


def test_rope_is_hugging_faces_and_fills_only_its_slots() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    cache = make_cache([(3, 20), (1, 5)], kv_heads=2, head_dim=16)
    positions = torch.tensor([17, 18, 19, 4])
    tables = cache.page_tables
    slots = torch.stack(
        [
            tables[s, p // 16].long() * 16 + p % 16
            for s, p in zip([0, 0, 0, 1], positions.tolist(), strict=True)
        ]
    )
    q, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    every = torch.arange(32)[None]
    cos, sin = LlamaRotaryEmbedding(config)(q, every)
    before = cache.arena.clone()

    out = rope_kv_write(q, k, v, cos[0], sin[0], positions, cache.arena, cache.layout, 1, slots)

    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[:, positions], sin[:, positions]
    )
    torch.testing.assert_close(out, expected_q[0].transpose(0, 1))
    pages = cache.arena.view(-1, 2, 2, 2, 16, 16)
    written = pages[slots // 16, 1, :, :, slots % 16]  # [T, 2, K, D]
    torch.testing.assert_close(written[:, 0], expected_k[0].transpose(0, 1))
    torch.testing.assert_close(written[:, 1], v)
    changed = (cache.arena != before) & ~(cache.arena.isnan() & before.isnan())
    assert changed.sum() <= 4 * 2 * 2 * 16


@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(1, 33), (1, 16), (1, 7)],
        [(5, 5)],
        [(1, 40), (6, 22), (1, 3), (17, 17), (2, 64)],
        [(0, 0), (1, 9), (0, 0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 64])
def test_attention_matches_dense(
    sequences: list[tuple[int, int]], heads: tuple[int, int], window: int | None
) -> None:
    num_heads, kv_heads = heads
    cache = make_cache(sequences, kv_heads=kv_heads, head_dim=16)
    q = torch.randn(sum(n for n, _ in sequences), num_heads, 16)
    expected = []
    for s, (new, context) in enumerate(sequences):
        k = cache.k[s].repeat_interleave(num_heads // kv_heads, dim=1)
        v = cache.v[s].repeat_interleave(num_heads // kv_heads, dim=1)
        for i in range(new):
            end = context - new + i + 1
            seen = slice(0 if window is None else max(end - window, 0), end)
            row = q[len(expected)]
            weights = (torch.einsum("hd,nhd->hn", row, k[seen]) * 0.3).softmax(-1)
            expected.append(torch.einsum("hn,nhd->hd", weights, v[seen]))
    for op in (paged_attention, paged_attention_ref):
        out = op(
            q,
            cache.arena,
            cache.layout,
            1,
            cache.query_start,
            cache.context_lens,
            cache.page_tables,
            0.3,
            window,
        )
        torch.testing.assert_close(out, torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "segments",
    [
        [(3, -1)],
        [(1, 0)],
        [(2, 1), (3, -1), (0, 2), (1, 0), (4, 2)],
    ],
    ids=str,
)
def test_lora_matches_dense(segments: list[tuple[int, int]]) -> None:
    widths = {0: (24, 24), 1: (24, 8), 2: (24, 8)}
    adapters = make_adapters(widths, [4, 16, 27], missing=frozenset({(1, 1), (2, 2)}))
    lora = adapters.batch(segments)
    x, y = (
        torch.randn(sum(n for n, _ in segments), 24),
        torch.randn(sum(n for n, _ in segments), 40),
    )
    expected, row = y.clone(), 0
    for count, adapter in segments:
        own = slice(row, row + count)
        for p, low, high in ((0, 0, 24), (1, 24, 32), (2, 32, 40)):
            expected[own, low:high] += adapters.delta(x[own], adapter, 1, p)
        row += count

    h = lora_shrink(x, adapters.arena, lora, 1, (0, 1, 2))
    lora_expand(h, adapters.arena, lora, 1, (0, 1, 2), y, (0, 24, 32, 40))

    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_silu_mul() -> None:
    gate_up = torch.randn(5, 22)
    gate, up = gate_up[:, :11], gate_up[:, 11:]
    torch.testing.assert_close(silu_mul(gate_up), gate * torch.sigmoid(gate) * up)


def test_bitmask_touches_only_its_rows() -> None:
    logits = torch.randn(3, 45)
    before = logits.clone()
    allowed = torch.rand(3, 64) < 0.5
    weights = torch.tensor([1 << j if j < 31 else -(1 << 31) for j in range(32)])
    bitmask = (allowed.view(3, 2, 32) * weights).sum(-1).to(torch.int32)

    apply_bitmask(logits, bitmask, torch.tensor([2, 0]))

    assert torch.equal(logits[1], before[1])
    for row in (0, 2):
        ok = allowed[row, :45]
        assert torch.equal(logits[row, ok], before[row, ok])
        assert bool(logits[row, ~ok].isneginf().all())
