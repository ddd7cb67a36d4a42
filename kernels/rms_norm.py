"""RMSNorm, alone and with the residual addition before it.

Numerics are Hugging Face's LlamaRMSNorm: the mean square in fp32, the normalised row cast back to
the input's type, then times the weight.
"""

from __future__ import annotations

import torch


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E], weight [E] -> [T, E], each row scaled to unit mean square, times `weight`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, E] -> (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm_ref(total, weight, eps), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, E], weight [E] -> [T, E], each row scaled to unit mean square, times `weight`."""
    return rms_norm_ref(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, E] -> (rms_norm(x + residual), x + residual); the inputs are kept."""
    return add_rms_norm_ref(x, residual, weight, eps)
