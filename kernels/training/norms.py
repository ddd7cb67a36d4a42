"""RMSNorm and its gradient with respect to the input; the weight is the base's and stays.

Numerics are Hugging Face's: the mean square in float32 at least, the normalised row rounded to the
input's type, then times the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> like x: rows of unit mean square, times `weight`."""
    wide = widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dy: torch.Tensor
) -> torch.Tensor:
    """The gradient of x, from x and the gradient of the norm's output, both [..., D]."""
    wide = widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, normed = widen(dy) * widen(weight), wide * inverse
    mean = (scaled * normed).mean(-1, keepdim=True)
    return ((scaled - normed * mean) * inverse).to(x.dtype)


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm that a linear layer computes before its product, instead of keeping the result."""

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_forward(x, self.weight, self.eps)

    def backward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return rms_norm_backward(x, self.weight, self.eps, dy)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.norm.backward(x, dy.contiguous()), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> like x: rows of unit mean square, times `weight`.

    Differentiable in x.
    """
    return _RmsNorm.apply(x, Norm(weight, eps))
