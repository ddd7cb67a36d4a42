"""The gated activation of an MLP and its gradient, without keeping the product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.silu_mul import silu_mul_ref, silu_mul_triton, turned
from kernels.training.norms import widen

# Factors in z of `kernels.silu_mul`: of x, and of x^3 to it.
_GELU, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def silu_mul_backward_torch(
    gate_up: torch.Tensor, dy: torch.Tensor, is_gelu: bool = False
) -> torch.Tensor:
    """Return the gradient of gate_up [T, 2I], from it and the product's gradient [T, I]."""
    gate, up = widen(gate_up).chunk(2, dim=-1)
    wide, z, slope = widen(dy), gate, torch.ones_like(gate)
    if is_gelu:
        z = _GELU * (gate + _CUBE * gate**3)
        slope = _GELU * (1 + 3 * _CUBE * gate**2)
    sigmoid = torch.sigmoid(z)
    d_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid) * slope)
    return torch.cat((d_gate, wide * gate * sigmoid), dim=-1).to(gate_up.dtype)


@jit()
def slope_of(gate, GELU: tl.constexpr):
    """Return the derivative of `turned`."""
    slope = tl.full(gate.shape, 1.0, tl.float32)
    if GELU:
        slope = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    return slope


@jit()
def _silu_back_kernel(
    gate_up_ptr,
    dy_ptr,
    out_ptr,
    product_ptr,
    width,
    PRODUCT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    place = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + width, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(turned(gate, GELU))
    d_gate = dy * up * sigmoid * (1 + gate * (1 - sigmoid) * slope_of(gate, GELU))
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + place, d_gate.to(dtype), mask=mask)
    tl.store(out_ptr + place + width, (dy * gate * sigmoid).to(dtype), mask=mask)
    if PRODUCT:
        silu = (gate * sigmoid).to(dtype)  # rounded before the product, as in the forward pass
        tl.store(product_ptr + row * width + columns, silu * up.to(dtype), mask=mask)


def silu_mul_backward_triton(
    gate_up: torch.Tensor,
    dy: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    product: torch.Tensor | None = None,
    is_gelu: bool = False,
) -> torch.Tensor:
    """As `silu_mul_backward_torch`; all contiguous.

    out      written instead of a new tensor; may be gate_up itself
    product  [T, I], written as well: silu(gate) * up; may be dy itself
    """
    width = gate_up.shape[1] // 2
    out = torch.empty_like(gate_up) if out is None else out
    block = min(1024, next_power_of_2(width))
    if gate_up.numel():
        _silu_back_kernel[(gate_up.shape[0], ceil_div(width, block))](
            gate_up_ptr=gate_up, dy_ptr=dy, out_ptr=out,
            product_ptr=dy if product is None else product, width=width,
            PRODUCT=product is not None, GELU=is_gelu, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def silu_mul_forward(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I], or gelu(gate) * up."""
    if use_triton(gate_up) and gate_up.numel():
        return silu_mul_triton(gate_up.contiguous(), is_gelu=is_gelu)
    return silu_mul_ref(gate_up, is_gelu)


def silu_mul_backward(gate_up: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return the gradient of gate_up; see `silu_mul_backward_torch`."""
    if use_triton(gate_up):
        return silu_mul_backward_triton(gate_up.contiguous(), dy.contiguous())
    return silu_mul_backward_torch(gate_up, dy)


@dataclass(frozen=True, slots=True)
class SiluMul:
    """The activation that a linear layer computes before its product, instead of keeping it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_mul_forward(x)

    def backward(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return silu_mul_backward(x, dy)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return silu_mul_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        return silu_mul_backward(gate_up, dy)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]; keeps gate_up alone."""
    out: torch.Tensor = _SiluMul.apply(  # type: ignore[no-untyped-call]
        gate_up
    )
    return out
