"""RMSNorm, alone and with the residual addition before it.

It rounds like Hugging Face's LlamaRMSNorm: the mean square in fp32, the normalised row cast back to
the input's type, then times the weight. Source: Zhang and Sennrich, arXiv:1910.07467.
"""

from __future__ import annotations

import torch

from kernels.backend import jit, next_power_of_2, tl, use_triton


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E], weight [E] -> [T, E], each row scaled to unit mean square, times `weight`.

    Rows may have more dimensions, and a weight each: x [T, H, D], weight [H, D].
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


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
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
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
        if HAS_DELTA:
            total += tl.load(delta_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
        x = (total + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row + columns, x, mask=mask)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * inverse).to(x.dtype)
    tl.store(out_ptr + row + columns, normed * weight, mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch one program per row; x is contiguous."""
    out = torch.empty_like(x)
    block = next_power_of_2(x.shape[1])
    _norm_kernel[(x.shape[0],)](
        x_ptr=x,
        residual_ptr=x,
        delta_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        total_ptr=out,
        width=x.shape[1],
        eps=eps,
        HAS_RESIDUAL=False,
        HAS_DELTA=False,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one program per row; inputs are contiguous."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(x.shape[1])
    _norm_kernel[(x.shape[0],)](
        x_ptr=x,
        residual_ptr=residual,
        delta_ptr=x if delta is None else delta,
        weight_ptr=weight,
        out_ptr=out,
        total_ptr=total,
        width=x.shape[1],
        eps=eps,
        HAS_RESIDUAL=True,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out, total


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
