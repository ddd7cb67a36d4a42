"""The fused first half of an MLP against the dense arithmetic, ragged segments and all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gate_up import gate_up_silu_ref, gate_up_silu_triton
from kernels.lora.plan import TILE_T, make_plan
from kernels.lora.shrink import lora_shrink_triton
from kernels.silu_mul import silu_mul_ref
from tests.kernels.cases import make_adapters
from tests.kernels.test_triton import assert_near

E, WIDTH = 24, 40
SIZES: dict[str, Any] = {"num_programs": 3, "block_n": 32, "block_k": 16, "band": 2}


@pytest.fixture(autouse=True)
def _has_tensor_cores(dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("tiles of fp32 do not fit")


@pytest.mark.parametrize("num_tokens", [1, TILE_T, 2 * TILE_T + 7])
def test_gate_up_silu(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(num_tokens, E, device=device).to(dtype)
    weight = (torch.randn(2 * WIDTH, E, device=device) * 0.3).to(dtype)
    out = gate_up_silu_triton(x, weight, **SIZES)
    assert_near(out, gate_up_silu_ref(x, weight), dtype)


@pytest.mark.parametrize(
    "segments",
    [
        [(300, 0)],
        [(70, 1), (2, -1), (0, 0), (150, 0), (33, 2), (1, 1), (70, -1)],
        [(TILE_T, 0), (TILE_T, 1), (1, 2)],
        [(TILE_T - 1, 2), (2, 0), (TILE_T - 2, -1), (5, 1)],
        [(40, -1)],
    ],
    ids=str,
)
def test_gate_up_silu_with_adapters(
    segments: list[tuple[int, int]], dtype: torch.dtype, device: str
) -> None:
    widths = {4: (E, WIDTH), 5: (E, WIDTH)}
    missing = frozenset({(1, 4), (0, 5)})
    adapters = make_adapters(widths, [4, 27, 40], missing=missing, dtype=dtype, device=device)
    num_tokens = sum(count for count, _ in segments)
    x = torch.randn(num_tokens, E, device=device).to(dtype)
    weight = (torch.randn(2 * WIDTH, E, device=device) * 0.3).to(dtype)
    lora = adapters.batch(segments)
    plan = make_plan(lora, num_tokens, 32)
    h = lora_shrink_triton(x, adapters.arena, lora.table, plan, 1, (4, 5))
    out = gate_up_silu_triton(
        x, weight, h=h, arena=adapters.arena, table=lora.table, plan=plan, layer=1, **SIZES
    )

    full, row = (x.float() @ weight.float().T), 0
    for count, adapter in segments:
        own = slice(row, row + count)
        full[own, :WIDTH] += adapters.delta(x[own], adapter, 1, 4)
        full[own, WIDTH:] += adapters.delta(x[own], adapter, 1, 5)
        row += count
    assert_near(out, silu_mul_ref(full.to(dtype)), dtype)
