"""Experts by groups of tokens, against one token and one expert after another."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from kernels.experts import ExpertShape, ExpertWeights, expert_mlp


def experts_ref(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shape: ExpertShape,
    biases: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    rows, (of_router, of_gate_up, of_down) = [], biases
    for token in x:
        shares = linear(token, router, of_router).softmax(-1)
        best = shares.sort(descending=True).indices[: shape.chosen]
        total = shares[best].sum() if shape.is_normed else 1.0
        out = torch.zeros_like(token)
        for expert in best.tolist():
            first = 2 * shape.inner * expert
            gate, up = (
                linear(token, gate_up[start : start + shape.inner])
                + of_gate_up.flatten()[start : start + shape.inner]
                for start in (first, first + shape.inner)
            )
            own = down[len(token) * expert : len(token) * (expert + 1)]
            inner = silu(gate) * up
            if shape.limit:
                gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
                inner = (up + 1) * silu(shape.alpha * gate) / shape.alpha
            out = out + shares[expert] / total * (linear(inner, own) + of_down[expert])
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("is_gpt_oss", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize(("num", "chosen"), [(7, 3), (4, 4), (5, 1)])
def test_groups_are_single_experts_one_after_another(
    num: int, chosen: int, num_tokens: int, is_gpt_oss: bool, is_normed: bool
) -> None:
    torch.manual_seed(num_tokens)
    shape = ExpertShape(num, chosen, 6, is_normed)
    if is_gpt_oss:
        shape = shape._replace(has_biases=True, limit=1.5, alpha=1.7)
    biases = tuple(
        torch.randn(size, dtype=torch.float64) * is_gpt_oss
        for size in ((num,), (num, 12), (num, 10))
    )
    sizes = (num_tokens, 10), (num, 10), (num * 12, 10), (num * 10, 6)
    x, *weights = (torch.randn(size, dtype=torch.float64) for size in sizes)
    x.requires_grad_()
    router, gate_up, down = weights
    stacked = ExpertWeights(router, gate_up.view(num, 12, 10), down.view(num, 10, 6))
    if is_gpt_oss:
        names = ("router_bias", "gate_up_bias", "down_bias")
        stacked = stacked._replace(**dict(zip(names, biases, strict=True)))
    found = expert_mlp(x, stacked, shape)
    wanted = experts_ref(x, router, gate_up, down, shape, biases)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    seed = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(out, x, seed)[0] for out in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)
