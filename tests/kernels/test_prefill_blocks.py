"""Prompts cut into blocks, with decodes between them that the prefill kernel has to leave alone."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import paged_attention_ref
from kernels.attention_prefill import attention_prefill_triton
from tests.kernels.cases import make_cache


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("gap", [1, 31, 33, 65, 77, 94, 100, 140])
def test_decodes_between_prompts_are_left_alone(gap: int, window: int | None, device: str) -> None:
    """However many there are: a block without a context reads no key, and writes no row."""
    torch.manual_seed(gap)
    first, last = (20, 20), (12, 40)
    cache = make_cache(
        [first, last], kv_heads=2, head_dim=16, layer=0, dtype=torch.float32, device=device
    )
    starts = torch.tensor([0, 20, 20 + gap, 32 + gap], dtype=torch.int32, device=device)
    contexts = torch.tensor([20, 0, 40], dtype=torch.int32, device=device)
    tables = cache.page_tables[[0, 0, 1]]
    q = torch.randn(32 + gap, 4, 16, device=device)
    out = torch.full_like(q, 7.0)
    attention_prefill_triton(
        q,
        cache.arena,
        cache.layout,
        0,
        starts,
        contexts,
        tables,
        0.2,
        max_new=32,
        window=window,
        out=out,
        block_n=64,
    )
    is_prompt = torch.ones(32 + gap, dtype=torch.bool, device=device)
    is_prompt[20 : 20 + gap] = False
    expected = paged_attention_ref(
        q[is_prompt],
        cache.arena,
        cache.layout,
        0,
        cache.query_start,
        cache.context_lens,
        cache.page_tables,
        0.2,
        window=window,
    )
    assert torch.allclose(out[is_prompt], expected, atol=1e-5)
    assert bool((out[~is_prompt] == 7.0).all())
