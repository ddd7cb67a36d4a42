"""Every operation of kernels.training in float64: its value and gradients are autograd's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.training import (
    Norm,
    Pools,
    RunStep,
    SiluMul,
    adamw,
    answer_loss,
    attention,
    lora_linear,
    make_rows,
    rms_norm,
    rope,
    silu_mul,
)
from kernels.training.reference import (
    answer_loss_ref,
    attention_ref,
    lora_linear_ref,
    rms_norm_ref,
    rope_ref,
    silu_mul_ref,
)
from tests.kernels.training.cases import MIXES, Run, make_batch

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradients(out: torch.Tensor, inputs: list[torch.Tensor], seed: int = 7) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return list(torch.autograd.grad(out, inputs, randn(*out.shape)))


def assert_same(out: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Both have the same value and the same gradients."""
    torch.testing.assert_close(out, expected, **EXACT)
    pairs = zip(gradients(out, inputs), gradients(expected, inputs), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("befores", ["none", "norm", "silu"])
@pytest.mark.parametrize("mix", MIXES)
def test_lora_linear(mix: str, befores: str) -> None:
    width = 11
    batch = make_batch(MIXES[mix], width, (5, 9, 3), torch.float64)
    num_tokens = batch.segments.num_tokens
    x = randn(num_tokens, 2 * width if befores == "silu" else width).requires_grad_()
    residual = randn(num_tokens, 17).requires_grad_()
    norm_weight = randn(width)
    before = {"none": None, "norm": Norm(norm_weight, 1e-5), "silu": SiluMul()}[befores]
    y = lora_linear(
        x, batch.weight, batch.bias, batch.site, batch.pools, batch.segments,
        before=before, residual=residual,
    )  # fmt: skip

    values = batch.pools.values.clone().requires_grad_()
    inner = x
    if before is not None:
        inner = silu_mul_ref(x) if befores == "silu" else rms_norm_ref(x, norm_weight, 1e-5)
    expected = residual + lora_linear_ref(
        inner, batch.weight, batch.bias, batch.site, values, batch.segments
    )
    torch.testing.assert_close(y, expected, **EXACT)
    ours = gradients(y, [x, residual])
    *theirs, d_values = gradients(expected, [x, residual, values])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    own = batch.owned
    torch.testing.assert_close(batch.pools.gradient[own] - 1, d_values[own], **EXACT)
    assert bool((batch.pools.gradient[~own] == 1).all())


def test_a_run_trains_alone_as_in_company() -> None:
    runs = MIXES["mixed"]
    together = make_batch(runs, 11, (5, 9, 3), torch.float64)
    x = randn(together.segments.num_tokens, 11).requires_grad_()
    y = lora_linear(x, together.weight, None, together.site, together.pools, together.segments)
    torch.manual_seed(3)
    dy = randn(*y.shape)
    y.backward(dy)
    for number, (start, end) in enumerate(itertools.pairwise(together.segments.bounds)):
        only = [
            run if i == number else type(run)(run.rank, run.trains, 0) for i, run in enumerate(runs)
        ]
        alone = make_batch(only, 11, (5, 9, 3), torch.float64)
        own = x.detach()[start:end].requires_grad_()
        lora_linear(own, alone.weight, None, alone.site, alone.pools, alone.segments).backward(
            dy[start:end]
        )
        changed = alone.pools.gradient != 1
        assert bool((alone.pools.gradient[changed] == together.pools.gradient[changed]).all())


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """`torch.empty` has NaN, not what happens to be there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class StridedSums(TorchDispatchMode):
    """Over how many elements bfloat16 products summed whose left side lies in wider rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            left = args[-2]
            if left.dtype == torch.bfloat16 and left.stride(0) > left.shape[1]:
                self.found.add(left.shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [1, 2, 3, 16, 31, 33, 48, 64, 100])
@pytest.mark.usefixtures("nan_in_new_memory")
def test_in_bfloat16_nothing_undefined_is_read(rank: int) -> None:
    runs = [Run(rank, (True, False, True), 70), Run(8, (False, True, True), 50)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        batch = make_batch(runs, 64, (64, 32, 32), dtype)
        x = randn(batch.segments.num_tokens, 64).to(dtype).requires_grad_()
        with StridedSums() as sums:
            y = lora_linear(x, batch.weight, None, batch.site, batch.pools, batch.segments)
            [dx] = gradients(y, [x])
        results.append((y.detach(), dx, batch.pools.gradient[batch.owned]))
        # Where oneDNN's products with AMX read past a row's end, on this machine or another.
        assert not {n for n in sums.found if (n % 32 if n > 32 else n % 2)}
    for ours, wide in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), wide, rtol=0.05, atol=0.1 * float(wide.std()))


def test_rms_norm() -> None:
    for shape in ((1, 7), (5, 16), (3, 4, 6)):
        x, weight = randn(*shape).requires_grad_(), randn(shape[-1])
        assert_same(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), [x])


def test_silu_mul() -> None:
    x = randn(3, 14).requires_grad_()
    assert_same(silu_mul(x), silu_mul_ref(x), [x])


def test_rope() -> None:
    rows = make_rows([3, 1, 6], "cpu")
    angles = randn(6, 4).repeat(1, 2)
    x = randn(10, 3, 8).requires_grad_()
    tables = (angles.cos(), angles.sin(), rows.positions)
    assert_same(rope(x, *tables), rope_ref(x, *tables), [x])


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 9], [0, 4, 0, 2]])
def test_attention(lengths: list[int], window: int | None) -> None:
    rows = make_rows(lengths, "cpu")
    total = sum(lengths)
    packed = randn(total, 8, 6).requires_grad_()
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    out = attention(q, k, v, rows, window=window)
    assert_same(out, attention_ref(q, k, v, rows, 6**-0.5, window), [packed])


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("num_answers", [0, 1, 9])
def test_answer_loss(num_answers: int, with_norm: bool) -> None:
    hidden, head = randn(12, 6).requires_grad_(), randn(23, 6)
    tokens = torch.randperm(12)[:num_answers]
    targets, weights = torch.randint(23, (num_answers,)), torch.rand(num_answers)
    norm = Norm(randn(6), 1e-5) if with_norm else None
    total, losses = answer_loss(hidden, head, tokens, targets, weights, norm=norm, chunk=4)
    inner = hidden if norm is None else rms_norm_ref(hidden, norm.weight, 1e-5)
    assert_same(total, answer_loss_ref(inner, head, tokens, targets, weights), [hidden])
    assert losses.shape == (num_answers,)
    torch.testing.assert_close((losses * weights).sum(), total.detach(), **EXACT)


def test_a_loss_without_gradient() -> None:
    hidden, head = randn(3, 4), randn(7, 4)
    one = torch.ones(1)
    total, _ = answer_loss(hidden, head, torch.tensor([2]), torch.tensor([5]), one)
    expected = answer_loss_ref(hidden, head, torch.tensor([2]), torch.tensor([5]), one)
    torch.testing.assert_close(total, expected, **EXACT)


def _pools(size: int, dtype: torch.dtype = torch.float64) -> Pools:
    tensors = [torch.randn(size, dtype=dtype) for _ in range(3)]
    return Pools(
        tensors[0], tensors[0], tensors[1], tensors[2].square(), torch.zeros_like(tensors[0])
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_is_torchs(dtype: torch.dtype) -> None:
    pools = _pools(3072, dtype)
    pools.first_moment.zero_()
    pools.second_moment.zero_()
    bounds = [(0, 1024, 1e-2, 0.0, 1.0), (1024, 2048, 3e-3, 0.1, math.inf)]
    theirs = []
    for low, size, lr, decay, _ in bounds:
        theirs.append(torch.nn.Parameter(pools.master[low : low + size].clone()))
        theirs[-1].optimizer = torch.optim.AdamW([theirs[-1]], lr=lr, weight_decay=decay)
    for step in range(1, 4):
        pools.gradient.copy_(torch.randn(3072, dtype=dtype))
        for (low, size, _, _, most), parameter in zip(bounds, theirs, strict=True):
            parameter.grad = pools.gradient[low : low + size].clone()
            torch.nn.utils.clip_grad_norm_([parameter], most)
            parameter.optimizer.step()
        adamw(
            pools,
            [
                RunStep(first=low, size=size, step=step, lr=lr, weight_decay=decay, max_norm=most)
                for low, size, lr, decay, most in bounds
            ],
        )
        for (low, size, *_), parameter in zip(bounds, theirs, strict=True):
            ours = pools.master[low : low + size]
            tolerance = 1e-12 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(ours, parameter.data, rtol=tolerance, atol=tolerance)
        assert not pools.gradient.any()


def test_a_run_that_is_not_finite_is_left_alone() -> None:
    pools = _pools(2048)
    pools.gradient.normal_()
    pools.gradient[5] = math.nan
    before = [t[:1024].clone() for t in (pools.master, pools.first_moment, pools.second_moment)]
    other = pools.master[1024:].clone()
    norms = adamw(pools, [RunStep(first=0, size=1024, step=1, lr=0.1),
                          RunStep(first=1024, size=1024, step=1, lr=0.1)])  # fmt: skip
    assert norms.isfinite().tolist() == [False, True]
    after = [t[:1024] for t in (pools.master, pools.first_moment, pools.second_moment)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(other, pools.master[1024:])
    assert not pools.gradient.any()
