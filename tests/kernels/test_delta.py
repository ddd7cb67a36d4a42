"""The gated delta net: chunks against single tokens, and pieces against the whole."""

from __future__ import annotations

import pytest
import torch

from kernels.delta import (
    DeltaShape,
    DeltaState,
    DeltaWeights,
    delta_net,
    gated_delta,
    gated_delta_ref,
    groups_of,
)

SHAPE = DeltaShape(num_keys=2, num_values=4, key_dim=5, value_dim=3, kernel=4)
CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def weights() -> DeltaWeights:
    heads = SHAPE.num_values
    return DeltaWeights(random(SHAPE.widths[0], 4), random(heads) - 3, random(heads), random(3))


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_are_single_tokens_one_after_another(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    q, k = (torch.nn.functional.normalize(random(3, num_tokens, 2, 5), dim=-1) for _ in range(2))
    rest = random(3, num_tokens, 4, 3), -random(3, num_tokens, 4).abs(), random(3, num_tokens, 4)
    v, decay, rate = (each.requires_grad_() for each in (*rest[:2], rest[2].sigmoid().detach()))
    state = random(3, 4, 5, 3).requires_grad_()
    given = q.requires_grad_(), k.requires_grad_(), v, decay, rate, state
    ours, wanted = gated_delta(*given), gated_delta_ref(*given)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    seeds = [torch.randn_like(each) for each in wanted]
    found, right = (torch.autograd.grad(each, given, seeds) for each in (ours, wanted))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_a_decay_that_forgets_all_has_finite_gradients() -> None:
    """exp of a sum of decays that no token reads would overflow."""
    decay = torch.full((1, 70, 4), -50.0).requires_grad_()
    heads = torch.rand(1, 70, 2, 5), torch.rand(1, 70, 2, 5), torch.rand(1, 70, 4, 3)
    read, _ = gated_delta(*heads, decay, torch.rand(1, 70, 4), torch.zeros(1, 4, 5, 3))
    (gradient,) = torch.autograd.grad(read.sum(), decay)
    assert bool(read.isfinite().all() and gradient.isfinite().all())


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [2, 6, 1]])
def test_pieces_continue_from_the_state_before_them(pieces: list[int]) -> None:
    torch.manual_seed(1)
    own, packed = weights(), random(2, 9, sum(SHAPE.widths))
    first = DeltaState.zero(SHAPE, 2, CPU)
    whole, last = delta_net(packed, first, own, SHAPE, 1e-6)
    state, found = first, []
    for piece in packed.split(pieces, 1):
        out, state = delta_net(piece, state, own, SHAPE, 1e-6)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 1), whole)
    torch.testing.assert_close(state.window, last.window)
    torch.testing.assert_close(state.matrix, last.matrix)


def test_sequences_are_grouped_by_length() -> None:
    groups = list(groups_of([0, 2, 3, 3, 5], CPU))
    assert [members for members, _ in groups] == [[0, 3], [1]]
    assert [rows.tolist() for _, rows in groups] == [[[0, 1], [3, 4]], [[2]]]
