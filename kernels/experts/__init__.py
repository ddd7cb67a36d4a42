"""Experts: many MLPs in a layer, among which a router chooses a few for each token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from kernels.silu_mul import silu_mul_ref


class ExpertShape(NamedTuple):
    """The shape of a layer's experts.

    num        experts of a layer
    chosen     of them, those that a token goes through
    inner      the width of each
    is_normed  whether the chosen ones' shares are divided by their sum
    has_shared  whether all tokens go through one more MLP
    """

    num: int
    chosen: int
    inner: int
    is_normed: bool = False
    has_shared: bool = False


class ExpertWeights(NamedTuple):
    """A layer's router and experts.

    shared_gate  of the MLP through which all tokens go, too: the sigmoid of its product is that
                 MLP's share; None: there is none
    """

    router: torch.Tensor  # [X, E]
    gate_up: torch.Tensor  # [X, 2 I, E]
    down: torch.Tensor  # [X, E, I]
    shared_gate: torch.Tensor | None = None  # [1, E]


def route(
    x: torch.Tensor, router: torch.Tensor, shape: ExpertShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, E], router [X, E] -> the chosen experts' shares, like x, and which they are, [T, C]."""
    scores = linear(x, router)
    wide = torch.promote_types(x.dtype, torch.float32)
    shares, chosen = scores.softmax(-1, dtype=wide).topk(shape.chosen)
    if shape.is_normed:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares.to(x.dtype), chosen


def expert_mlp(x: torch.Tensor, weights: ExpertWeights, shape: ExpertShape) -> torch.Tensor:
    """x [T, E] -> the sum of what the chosen experts make of it, by their shares, [T, E].

    The tokens are sorted by expert, so that each matrix is read once. Differentiable in x.
    """
    shares, chosen = route(x, weights.router, shape)
    order = chosen.flatten().argsort(stable=True)
    used, counts = torch.unique(chosen, return_counts=True)  # sorted
    parts = torch.split(x[order // shape.chosen], counts.tolist())
    made = [
        linear(silu_mul_ref(linear(rows, weights.gate_up[expert])), weights.down[expert])
        for expert, rows in zip(used.tolist(), parts, strict=True)
    ]
    back = order.argsort().view(-1, shape.chosen)
    return (shares[:, None] @ torch.cat(made)[back])[:, 0]
