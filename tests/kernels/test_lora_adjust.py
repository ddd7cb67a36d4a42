"""Gains and shifts by the Triton kernel, against the reference."""

from __future__ import annotations

import os

import pytest
import torch

from kernels import AdjustTable, ExtraSegment, LoraExtras, Projection
from kernels.lora.adjust import lora_adjust_ref, lora_adjust_triton

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

WIDTHS = (64, 32, 32, 64, 1500, 1500, 40, 16)
LAYERS = 2
# Parts of each virtual adapter: (has gains, has shifts, weight)
ADAPTERS = (
    [(True, False, 1.0)],
    [],
    [(False, True, 0.5), (True, True, -1.5), (True, False, 0.25)],
)
# (adapter, rows); -1: the base
SEGMENTS = [(0, 3), (-1, 2), (2, 4), (1, 1), (2, 1)]


def make_extras(dtype: torch.dtype) -> tuple[torch.Tensor, LoraExtras]:
    """An arena of vectors, every third place without one, and a step's extras over it."""
    torch.manual_seed(0)
    starts, gains, shifts, weights = [], [], [], []
    arena: list[torch.Tensor] = []
    used = 0
    for parts in ADAPTERS:
        starts.append(len(gains))
        for entry in range(LAYERS * len(WIDTHS)):
            width = WIDTHS[entry % len(WIDTHS)]
            for has_gain, has_shift, weight in parts:
                for offsets, has in ((gains, has_gain), (shifts, has_shift)):
                    has = has and (entry + len(offsets)) % 3 > 0
                    offsets.append(used if has else -1)
                    if has:
                        arena.append(torch.randn(width))
                        used += width
                weights.append(weight)
    table = AdjustTable(
        part_start=torch.tensor(starts, device=DEVICE),
        num_parts=torch.tensor([len(p) for p in ADAPTERS], dtype=torch.int32, device=DEVICE),
        gain_offset=torch.tensor(gains, device=DEVICE),
        shift_offset=torch.tensor(shifts, device=DEVICE),
        weight=torch.tensor(weights, dtype=torch.float32, device=DEVICE),
    )
    segments, rows = [], []
    for adapter, count in SEGMENTS:
        if adapter >= 0:
            segments.append(
                ExtraSegment(
                    start=len(rows), end=len(rows) + count, first=0, last=0,
                    adapter=adapter, embedding=(), head=(),
                )
            )  # fmt: skip
        rows += [adapter] * count
    extras = LoraExtras(
        segments=tuple(segments),
        row_adapter=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        adjust=table,
    )
    return torch.cat(arena).to(DEVICE, dtype), extras


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "projections",
    [
        (Projection.Q, Projection.K, Projection.V),
        (Projection.O,),
        (Projection.GATE, Projection.UP),
        (Projection.DOWN,),
    ],
    ids=str,
)
def test_adjust(projections: tuple[int, ...], dtype: torch.dtype, has_bias: bool) -> None:
    arena, extras = make_extras(dtype)
    offsets = [0]
    for projection in projections:
        offsets.append(offsets[-1] + WIDTHS[projection])
    bias = torch.randn(offsets[-1], device=DEVICE, dtype=dtype) if has_bias else None
    for layer in range(LAYERS):
        before = torch.randn(len(extras.row_adapter), offsets[-1], device=DEVICE, dtype=dtype)
        wanted, got = before.clone(), before.clone()
        lora_adjust_ref(wanted, arena, extras, layer, projections, tuple(offsets), bias)
        lora_adjust_triton(got, arena, extras, layer, projections, tuple(offsets), bias)
        torch.testing.assert_close(
            got, wanted, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2
        )
        for row, adapter in enumerate(extras.row_adapter.tolist()):
            if adapter in (-1, 1):
                assert torch.equal(got[row], before[row])
        assert len(projections) == 1 or not torch.equal(got, before)
