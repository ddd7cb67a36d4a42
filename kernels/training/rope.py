"""Rotary position embedding of packed tokens; the gradient is the rotation back."""

from __future__ import annotations

from typing import Any

import torch


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, back: bool
) -> torch.Tensor:
    """x [T, heads, D] -> the same shape, rotated by the angles of its positions, or back."""
    token_cos = cos[positions].unsqueeze(1).to(x.dtype)
    token_sin = sin[positions].unsqueeze(1).to(x.dtype)
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * token_cos - turned * token_sin if back else x * token_cos + turned * token_sin


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        ctx.angles = (cos, sin, positions)
        return rotate(x, cos, sin, positions, back=False)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return rotate(dy, *ctx.angles, back=True), None, None, None


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rotate each head of x [T, heads, D] by its token's position.

    cos, sin   [M, D] tables by position, the first half repeated (Hugging Face's form)
    positions  [T] int64, in the token's row
    """
    return _Rope.apply(x, cos, sin, positions)
