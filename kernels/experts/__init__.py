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
    has_biases  whether router and experts add biases
    is_fp4     whether checkpoints have the matrices in MXFP4
    limit      of gpt-oss's SwiGLU, which cuts gate and up off there; 0: SwiGLU as in Llama
    alpha      the factor in its sigmoid
    """

    num: int
    chosen: int
    inner: int
    is_normed: bool = False
    has_shared: bool = False
    has_biases: bool = False
    is_fp4: bool = False
    limit: float = 0.0
    alpha: float = 1.0


class ExpertWeights(NamedTuple):
    """A layer's router and experts.

    shared_gate  of the MLP through which all tokens go, too: the sigmoid of its product is that
                 MLP's share; None: there is none
    """

    router: torch.Tensor  # [X, E]
    gate_up: torch.Tensor  # [X, 2 I, E]
    down: torch.Tensor  # [X, E, I]
    shared_gate: torch.Tensor | None = None  # [1, E]
    router_bias: torch.Tensor | None = None  # [X]
    gate_up_bias: torch.Tensor | None = None  # [X, 2 I]
    down_bias: torch.Tensor | None = None  # [X, E]


def route(
    x: torch.Tensor, router: torch.Tensor, shape: ExpertShape, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, E], router [X, E] -> the chosen experts' shares, like x, and which they are, [T, C]."""
    scores = linear(x, router, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    shares, chosen = scores.softmax(-1, dtype=wide).topk(shape.chosen)
    if shape.is_normed:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares.to(x.dtype), chosen


def gated(gate_up: torch.Tensor, shape: ExpertShape) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I]"""
    if not shape.limit:
        return silu_mul_ref(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return (up + 1) * gate * (shape.alpha * gate).sigmoid()


#: Adds to an expert's product y [N, out], in place: (tokens, x [N, in], y, expert, is it down).
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool], None]


def expert_mlp(
    x: torch.Tensor, weights: ExpertWeights, shape: ExpertShape, add: Add | None = None
) -> torch.Tensor:
    """x [T, E] -> the sum of what the chosen experts make of it, by their shares, [T, E].

    The tokens are sorted by expert, so that each matrix is read once. Differentiable in x.
    """

    def product(tokens: torch.Tensor, rows: torch.Tensor, expert: int, is_down: bool) -> Any:
        matrices, biases = weights.gate_up, weights.gate_up_bias
        if is_down:
            matrices, biases = weights.down, weights.down_bias
        y = linear(rows, matrices[expert], None if biases is None else biases[expert])
        if add is not None:
            add(tokens, rows, y, expert, is_down)
        return y

    shares, chosen = route(x, weights.router, shape, weights.router_bias)
    order = chosen.flatten().argsort(stable=True)
    used, counts = torch.unique(chosen, return_counts=True)  # sorted
    made = []
    for expert, tokens in zip(
        used.tolist(), torch.split(order // shape.chosen, counts.tolist()), strict=True
    ):
        inner = gated(product(tokens, x[tokens], expert, False), shape)
        made.append(product(tokens, inner, expert, True))
    back = order.argsort().view(-1, shape.chosen)
    return (shares[:, None] @ torch.cat(made)[back])[:, 0]
