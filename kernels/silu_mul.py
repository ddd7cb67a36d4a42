"""The gated activation of a Llama MLP."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up [T, I]."""
    return silu_mul_ref(gate_up)
