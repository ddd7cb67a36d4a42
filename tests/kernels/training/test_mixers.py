"""Mixers of training beside plain attention: outputs and gradients, row by row."""

from __future__ import annotations

import torch

from kernels.delta import DeltaShape, DeltaState, DeltaWeights, delta_net
from kernels.training import DeltaHeads, GatedHeads, Heads, make_rows
from kernels.training.reference import attention_ref

LENGTHS = [3, 1, 5, 3]
SHAPE = DeltaShape(num_keys=1, num_values=2, key_dim=4, value_dim=6, kernel=3)


def gradient_of(mixer: GatedHeads | DeltaHeads, packed: torch.Tensor, dy: torch.Tensor) -> tuple:
    rows = make_rows(LENGTHS, "cpu")
    with torch.no_grad():
        mixed = mixer.attend(packed, rows)
        return mixed.out.flatten(1), mixer.backward(packed, mixed, dy, rows)


def test_gates_multiply_what_heads_attend_to() -> None:
    torch.manual_seed(0)
    dim, heads, kv = 4, 3, 1
    packed = torch.randn(sum(LENGTHS), (2 * heads + 2 * kv) * dim, dtype=torch.float64)
    dy = torch.randn(len(packed), heads * dim, dtype=torch.float64)
    plain = Heads(num_heads=heads, num_kv_heads=kv, dim=dim, cos=None, sin=None)
    out, gradient = gradient_of(GatedHeads(plain), packed, dy)
    given = packed.clone().requires_grad_()
    both, rest = given.split((2 * heads * dim, 2 * kv * dim), 1)
    each = [head.split(dim, 1) for head in both.split(2 * dim, 1)]
    q = torch.stack([query for query, _ in each], 1)
    k, v = (part.view(-1, kv, dim) for part in rest.split(kv * dim, 1))
    attended = attention_ref(q, k, v, make_rows(LENGTHS, "cpu"), dim**-0.5)
    wanted = attended.flatten(1) * torch.cat([gate for _, gate in each], 1).sigmoid()
    torch.testing.assert_close(out, wanted)
    (right,) = torch.autograd.grad(wanted, given, dy)
    torch.testing.assert_close(gradient, right)


def test_a_delta_net_begins_each_row_with_an_empty_state() -> None:
    torch.manual_seed(0)
    weights = DeltaWeights(*(torch.randn(n).double() for n in ((20, 3), 2, 2, 6)))
    packed = torch.randn(sum(LENGTHS), sum(SHAPE.widths), dtype=torch.float64)
    dy = torch.randn(len(packed), SHAPE.value_size, dtype=torch.float64)
    out, gradient = gradient_of(DeltaHeads(SHAPE, weights, 1e-5), packed, dy)
    given = packed.clone().requires_grad_()
    rows = []
    for row in given.split(LENGTHS):
        state = DeltaState.zero(SHAPE, 1, torch.device("cpu"))
        rows.append(delta_net(row[None], state, weights, SHAPE, 1e-5)[0][0])
    torch.testing.assert_close(out, torch.cat(rows))
    (right,) = torch.autograd.grad(torch.cat(rows), given, dy)
    torch.testing.assert_close(gradient, right)
