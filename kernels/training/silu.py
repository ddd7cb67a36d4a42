"""The gated activation of a Llama MLP and its gradient, without keeping the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernels.training.norms import widen


def silu_mul_forward(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_backward(gate_up: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of gate_up [T, 2I], from it and the gradient of the product [T, I]."""
    gate, up = widen(gate_up).chunk(2, dim=-1)
    wide, sigmoid = widen(dy), torch.sigmoid(gate)
    d_gate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((d_gate, wide * gate * sigmoid), dim=-1).to(gate_up.dtype)


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
        return silu_mul_backward(gate_up, dy.contiguous())


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]; keeps gate_up alone."""
    return _SiluMul.apply(gate_up)
