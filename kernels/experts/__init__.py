"""Experts: many MLPs in a layer, among which a router chooses a few for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


#: Adds to an expert's product y [N, out], in place: (tokens, x [N, in], y, expert, is it down).
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool], None]


def expert_mlp(
    x: torch.Tensor, weights: ExpertWeights, shape: ExpertShape, add: Add | None = None
) -> torch.Tensor:
    """x [T, E] -> the sum of what the chosen experts make of it, by their shares, [T, E].

    The tokens are sorted by expert, so that each matrix is read once. Differentiable in x.
    """

    def product(tokens: torch.Tensor, rows: torch.Tensor, expert: int, is_down: bool) -> Any:
        y = linear(rows, (weights.down if is_down else weights.gate_up)[expert])
        if add is not None:
            add(tokens, rows, y, expert, is_down)
        return y

    shares, chosen = route(x, weights.router, shape)
    order = chosen.flatten().argsort(stable=True)
    used, counts = torch.unique(chosen, return_counts=True)  # sorted
    made = []
    for expert, tokens in zip(
        used.tolist(), torch.split(order // shape.chosen, counts.tolist()), strict=True
    ):
        inner = silu_mul_ref(product(tokens, x[tokens], expert, False))
        made.append(product(tokens, inner, expert, True))
    back = order.argsort().view(-1, shape.chosen)
    return (shares[:, None] @ torch.cat(made)[back])[:, 0]
