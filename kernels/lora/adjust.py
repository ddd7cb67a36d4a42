"""Applies an adapter's vectors to the base's product: DoRA's row factors, and biases.

DoRA's y = f * (W x + s B A x) is computed as W x + (f - 1) * W x + s (f B) A x. The last term is an
ordinary LoRA; the middle one is here. All parts of a blend apply to the base's product, so their
gains are summed before they are applied.
"""

from __future__ import annotations

import itertools

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.lora.table import NUM_PROJECTIONS, LoraExtras


def lora_adjust_ref(
    y: torch.Tensor,
    arena: torch.Tensor,
    extras: LoraExtras,
    layer: int,
    projections: tuple[int, ...],
    out_offsets: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> None:
    """Add weight * (gain * (y + bias) + shift), summed over the parts of each row's adapter, to y.

    In place; call it before any adapter's output is added to y.

    y            [T, sum of out widths]: the base's product
    out_offsets  projection i is y[:, out_offsets[i]:out_offsets[i + 1]]
    bias         [sum of out widths] the base's bias, if y does not have it: it is added to y later
    Source: DoRA, arXiv:2402.09353, equation 5.
    """
    if extras.adjust is None:
        return
    flat, table = arena.view(-1), extras.adjust
    for segment in extras.segments:
        num_parts = int(table.num_parts[segment.adapter])
        for i, projection in enumerate(projections):
            entry = int(table.part_start[segment.adapter])
            entry += (layer * NUM_PROJECTIONS + projection) * num_parts
            low, high = out_offsets[i], out_offsets[i + 1]
            own = y[segment.start : segment.end, low:high]
            gain, shift = (
                _weighted_sum(flat, offsets, table.weight, entry, num_parts, high - low)
                for offsets in (table.gain_offset, table.shift_offset)
            )
            total = own.float()
            if gain is not None:
                product = total if bias is None else total + bias[low:high].float()
                total = torch.addcmul(total, product, gain)
            if shift is not None:
                total = total + shift
            own.copy_(total)


def _weighted_sum(
    flat: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor,
    entry: int,
    num_parts: int,
    width: int,
) -> torch.Tensor | None:
    """Return the weighted sum of the parts' vectors of an entry, fp32; None: there are none."""
    total: torch.Tensor | None = None
    for i in range(entry, entry + num_parts):
        offset = int(offsets[i])
        if offset >= 0:
            vector = flat[offset : offset + width].float() * weights[i]
            total = vector if total is None else total + vector
    return total


@jit("layer")
def _adjust_kernel(
    y_ptr,
    y_stride,
    bias_ptr,
    arena_ptr,
    row_adapter_ptr,
    part_start_ptr,
    num_parts_ptr,
    gain_offset_ptr,
    shift_offset_ptr,
    weight_ptr,
    layer,
    bound0,
    bound1,
    bound2,
    bound3,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    index = tl.program_id(1)
    adapter = tl.load(row_adapter_ptr + row)
    parts = tl.load(num_parts_ptr + adapter, mask=adapter >= 0, other=0)
    if parts > 0:
        projection = tl.where(index == 0, P0, tl.where(index == 1, P1, P2))
        low = tl.where(index == 0, bound0, tl.where(index == 1, bound1, bound2))
        high = tl.where(index == 0, bound1, tl.where(index == 1, bound2, bound3))
        first = tl.load(part_start_ptr + adapter) + (layer * 8 + projection) * parts
        columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < high - low
        gain = tl.zeros((BLOCK,), dtype=tl.float32)
        shift = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in range(0, parts):
            weight = tl.load(weight_ptr + first + part)
            offset = tl.load(gain_offset_ptr + first + part)
            mask = inside & (offset >= 0)
            vector = tl.load(arena_ptr + tl.maximum(offset, 0) + columns, mask=mask, other=0.0)
            gain += weight * vector.to(tl.float32)
            offset = tl.load(shift_offset_ptr + first + part)
            mask = inside & (offset >= 0)
            vector = tl.load(arena_ptr + tl.maximum(offset, 0) + columns, mask=mask, other=0.0)
            shift += weight * vector.to(tl.float32)
        place = y_ptr + row.to(tl.int64) * y_stride + low + columns
        y = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        product = y
        if HAS_BIAS:
            product += tl.load(bias_ptr + low + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (y + gain * product + shift).to(y_ptr.dtype.element_ty), mask=inside)


def lora_adjust_triton(
    y: torch.Tensor,
    arena: torch.Tensor,
    extras: LoraExtras,
    layer: int,
    projections: tuple[int, ...],
    out_offsets: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> None:
    """Launch a program per row, projection and part of the columns; skips rows without vectors."""
    table = extras.adjust
    if table is None:
        return
    widest = max(high - low for low, high in itertools.pairwise(out_offsets))
    block = min(1024, next_power_of_2(widest))
    p0, p1, p2 = (*map(int, projections), -1, -1)[:3]
    bounds = (*out_offsets, 0, 0)[:4]
    _adjust_kernel[(y.shape[0], len(projections), ceil_div(widest, block))](
        y_ptr=y,
        y_stride=y.stride(0),
        bias_ptr=y if bias is None else bias,
        arena_ptr=arena,
        row_adapter_ptr=extras.row_adapter,
        part_start_ptr=table.part_start,
        num_parts_ptr=table.num_parts,
        gain_offset_ptr=table.gain_offset,
        shift_offset_ptr=table.shift_offset,
        weight_ptr=table.weight,
        layer=layer,
        bound0=bounds[0],
        bound1=bounds[1],
        bound2=bounds[2],
        bound3=bounds[3],
        P0=p0,
        P1=p1,
        P2=p2,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )


def lora_adjust(
    y: torch.Tensor,
    arena: torch.Tensor,
    extras: LoraExtras,
    layer: int,
    projections: tuple[int, ...],
    out_offsets: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> None:
    """Apply each row's gains and shifts to y in place; arguments as in `lora_adjust_ref`."""
    adjust = lora_adjust_triton if use_triton(y) else lora_adjust_ref
    adjust(y, arena, extras, layer, projections, out_offsets, bias)
