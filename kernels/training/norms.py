"""RMSNorm and its gradient with respect to the input; the weight is the base's and stays.

Numerics are Hugging Face's: the mean square in float32 at least, the normalised row rounded to the
input's type, then times the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.backend import jit, next_power_of_2, tl, use_triton
from kernels.rms_norm import rms_norm_triton


def rms_norm_forward_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> like x: rows of unit mean square, times `weight`."""
    wide = widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * inverse).to(x.dtype) * weight).to(x.dtype)


def rms_norm_backward_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dy: torch.Tensor,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of x, from x and the gradient of the norm's output, both [..., D].

    added  like x: added to it
    """
    wide = widen(x)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scaled, normed = widen(dy) * widen(weight), wide * inverse
    mean = (scaled * normed).mean(-1, keepdim=True)
    gradient = (scaled - normed * mean) * inverse
    return (gradient if added is None else gradient + widen(added)).to(x.dtype)


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


@jit()
def _norm_back_kernel(
    x_ptr,
    weight_ptr,
    dy_ptr,
    added_ptr,
    dx_ptr,
    width,
    eps,
    HAS_ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    scaled, normed = dy * weight, x * inverse
    dx = (scaled - normed * (tl.sum(scaled * normed, axis=0) / width)) * inverse
    if HAS_ADDED:
        dx += tl.load(added_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + row + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def rms_norm_backward_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dy: torch.Tensor,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `rms_norm_backward_torch`; one program a row, all contiguous."""
    dx, width = torch.empty_like(x), x.shape[-1]
    block = next_power_of_2(width)
    if x.numel():
        _norm_back_kernel[(x.numel() // width,)](
            x_ptr=x, weight_ptr=weight, dy_ptr=dy, added_ptr=x if added is None else added,
            dx_ptr=dx, width=width, eps=eps, HAS_ADDED=added is not None, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return dx


def rms_norm_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> like x: rows of unit mean square, times `weight`."""
    if use_triton(x) and x.numel():
        rows = x.contiguous().view(-1, x.shape[-1])
        return rms_norm_triton(rows, weight, eps).view(x.shape)
    return rms_norm_forward_torch(x, weight, eps)


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dy: torch.Tensor,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of x, plus `added`; see `rms_norm_backward_torch`."""
    if use_triton(x):
        return rms_norm_backward_triton(x.contiguous(), weight, eps, dy.contiguous(), added)
    return rms_norm_backward_torch(x, weight, eps, dy, added)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that a linear layer computes before its product, instead of keeping the result.

    weight       None: x stays as it is
    is_centred   each row's mean is taken from it first, as in a LayerNorm
    """

    weight: torch.Tensor | None
    eps: float
    is_centred: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return x
        return rms_norm_forward(self._centred(x), self.weight, self.eps)

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of x, plus `added`."""
        if self.weight is None:
            return dy if added is None else dy + added
        if not self.is_centred:
            return rms_norm_backward(x, self.weight, self.eps, dy, added)
        dx = self._centred(rms_norm_backward(self._centred(x), self.weight, self.eps, dy))
        return dx if added is None else dx + added

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True) if self.is_centred else x


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return norm.forward(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.norm.backward(x, dy), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> like x: rows of unit mean square, times `weight`.

    Differentiable in x.
    """
    out: torch.Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        x, Norm(weight, eps)
    )
    return out
