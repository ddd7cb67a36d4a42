"""RMSNorm, alone and with the residual addition before it.

It rounds like Hugging Face's LlamaRMSNorm: the mean square in fp32, the normalised row cast back to
the input's type, then times the weight. The kernel also applies the scales of an FP8 product, and
quantises its output for the next one. Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl, use_triton
from kernels.fp8 import Activation, Fp8Matrix, Scales, empty_rows, scale_and_quantize


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E], weight [E] -> [T, E], each row scaled to unit mean square, times `weight`.

    Rows may have more dimensions, and a weight each: x [T, H, D], weight [H, D].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, E] -> (rms_norm(x + delta + residual), x + delta + residual)."""
    total = x + residual if delta is None else x + delta + residual
    return rms_norm_ref(total, weight, eps), total


@jit()
def _norm_kernel(
    x_ptr,
    residual_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    row_scale_ptr,
    column_scale_ptr,
    numbers_ptr,
    scale_ptr,
    fixed_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WRITES_OUT: tl.constexpr,
    WRITES_FP8: tl.constexpr,
    HAS_FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row + columns, mask=mask, other=0.0)
        total = x.to(tl.float32)
        if HAS_SCALES:
            total *= tl.load(row_scale_ptr + tl.program_id(0))
            total *= tl.load(column_scale_ptr + columns, mask=mask, other=0.0)
        if HAS_DELTA:
            total += tl.load(delta_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
        x = (total + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + columns, x, mask=mask)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * inverse).to(x.dtype) * weight
    if WRITES_OUT:
        tl.store(out_ptr + row + columns, normed, mask=mask)
    if WRITES_FP8:
        numbers, scale = scale_and_quantize(normed.to(tl.float32), fixed_ptr, HAS_FIXED)
        tl.store(numbers_ptr + row + columns, numbers, mask=mask)
        tl.store(scale_ptr + tl.program_id(0), scale)


def norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    scales: Scales | None = None,
    reader: Fp8Matrix | None = None,
    is_plain: bool = True,
) -> tuple[Activation, torch.Tensor]:
    """Launch one program per row over contiguous inputs [T, E].

    residual  given, the sum of all is normalised
    delta     added to x, which is then the product alone
    scales    what x is to be multiplied by before anything is added to it
    reader    the FP8 matrix that multiplies the output, which is quantised for it
    is_plain  whether anybody reads the output unquantised

    -> (the norm, the sum; x without a residual)
    """
    out = torch.empty_like(x) if is_plain else x
    total = x if residual is None else torch.empty_like(x)
    rows = None if reader is None else empty_rows(x)
    fixed = None if reader is None else reader.input_scale
    block = next_power_of_2(x.shape[1])
    _norm_kernel[(x.shape[0],)](
        x_ptr=x,
        residual_ptr=x if residual is None else residual,
        delta_ptr=x if delta is None else delta,
        weight_ptr=weight,
        out_ptr=out,
        total_ptr=total,
        row_scale_ptr=weight if scales is None else scales.rows,
        column_scale_ptr=weight if scales is None else scales.columns,
        numbers_ptr=out if rows is None else rows.numbers,
        scale_ptr=out if rows is None else rows.scale,
        fixed_ptr=weight if fixed is None else fixed,
        width=x.shape[1],
        eps=eps,
        HAS_RESIDUAL=residual is not None,
        HAS_DELTA=delta is not None,
        HAS_SCALES=scales is not None,
        WRITES_OUT=is_plain,
        WRITES_FP8=rows is not None,
        HAS_FIXED=fixed is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return Activation(out if is_plain else None, rows), total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch one program per row; x is contiguous."""
    normed, _ = norm_triton(x, weight, eps)
    return normed.given


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one program per row; inputs are contiguous."""
    normed, total = norm_triton(x, weight, eps, residual=residual, delta=delta)
    return normed.given, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E], weight [E] -> [T, E], each row scaled to unit mean square, times `weight`."""
    if use_triton(x):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_ref(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, E] -> (rms_norm(x + residual), x + residual); the inputs are kept.

    delta [T, E], if given, is added to x first: adapters' output, computed separately.
    """
    if use_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps, delta)
    return add_rms_norm_ref(x, residual, weight, eps, delta)
