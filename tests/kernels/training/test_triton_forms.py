"""Every Triton kernel of the training step against its torch form, on a card or interpreted.

New tensors hold NaN until they are written, and so does what lies between the runs' factors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from kernels.rope import Pairs
from kernels.silu_mul import silu_mul_ref as silu_mul_whole
from kernels.training import Pools, RunStep, SiluMul, lora, lora_linear, make_rows, segments
from kernels.training.adamw import adamw_torch, adamw_triton
from kernels.training.attention import attention
from kernels.training.attention_triton import attention_backward_triton, attention_forward_triton
from kernels.training.cross_entropy import loss_and_gradient_torch, loss_and_gradient_triton
from kernels.training.lora import lora_backward_a, lora_backward_b, lora_forward
from kernels.training.lora_both import lora_backward_b_triton
from kernels.training.lora_torch import add_b_gradient_torch, lora_down_torch, lora_in_torch
from kernels.training.lora_triton import lora_back_triton, lora_out_triton
from kernels.training.norms import rms_norm_backward_torch, rms_norm_backward_triton
from kernels.training.reference import attention_ref, lora_linear_ref, silu_mul_ref
from kernels.training.rope import rotate, rotate_triton
from kernels.training.silu import silu_mul_backward_torch, silu_mul_backward_triton
from tests.kernels.training.cases import MIXES, Batch, make_batch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole; NaN never passes."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).norm() / (expected.double().norm() + 1e-9)
    assert error.item() <= TOLERANCE[dtype]


def wide(batch: Batch) -> Batch:
    """The same values in float32."""
    fields = {name: getattr(batch.pools, name).clone() for name in Pools.__dataclass_fields__}
    fields["values"] = batch.pools.values.float()
    weights = [weight.float() for weight in batch.weights]
    return dataclasses.replace(batch, weights=weights, pools=Pools(**fields))


def both_passes(
    batch: Batch,
    x: torch.Tensor,
    y: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    triton: bool,
) -> torch.Tensor:
    """The adapters' forward pass into y, then their backward pass into dx; u."""
    monkeypatch.setattr(lora, "use_triton", lambda _: triton)
    site, parts, pools = batch.site, batch.segments, batch.pools
    u = lora_forward(x, y, pools.values, site, parts)
    lora_backward_a(lora_backward_b(u, dy, pools, site, parts), x, dx, pools, site, parts)
    assert u is not None
    return u


@pytest.mark.parametrize("widths", [(24, 40, 8), (17, 3, 130)])
@pytest.mark.parametrize("mix", MIXES)
def test_lora(
    mix: str,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "CHUNK", 16)  # that some runs' gradients have several parts
    width = 40 if widths[0] == 24 else 35
    batch = make_batch(MIXES[mix], width, widths, dtype, device)
    theirs = wide(batch)
    site, parts, own = batch.site, batch.segments, batch.owned
    if site.max_rank == 0:
        return
    x = torch.randn(parts.num_tokens, width, device=device).to(dtype)
    y, dy = torch.randn(2, parts.num_tokens, sum(widths), device=device).to(dtype)
    dx = torch.randn_like(x)
    expected_y, expected_dx = y.float().clone(), dx.float().clone()
    expected_u = lora_in_torch(x.float(), theirs.pools.values, site, parts)
    u = both_passes(batch, x, y, dy, dx, monkeypatch, triton=True)
    both_passes(theirs, x.float(), expected_y, dy.float(), expected_dx, monkeypatch, triton=False)
    used = ~expected_u.isnan()
    assert_near(u[used], expected_u[used], dtype)
    assert_near(y, expected_y, dtype)
    assert_near(dx, expected_dx, dtype)
    assert_near(batch.pools.gradient[own], theirs.pools.gradient[own], dtype)
    assert bool((batch.pools.gradient[~own] == 1).all())


@pytest.mark.parametrize("mix", ["mixed", "one token", "without rows", "eights"])
def test_both_from_one_pass(
    mix: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "CHUNK", 16)
    batch = make_batch(MIXES[mix], 40, (24, 40, 8), dtype, device)
    theirs = wide(batch)
    site, parts, own = batch.site, batch.segments, batch.owned
    u = torch.randn(parts.num_tokens, 3 * site.padded_rank, device=device).to(dtype)
    dy = torch.randn(parts.num_tokens, 72, device=device).to(dtype)
    du = lora_backward_b_triton(
        u, dy, batch.pools.values, batch.pools.gradient, site, parts, block_t=16, block_n=16
    )
    expected = lora_down_torch(dy.float(), theirs.pools.values, site, parts)
    add_b_gradient_torch(u.float(), dy.float(), theirs.pools.gradient, site, parts)
    used = ~expected.isnan()
    assert_near(du[used], expected[used], dtype)
    assert_near(batch.pools.gradient[own], theirs.pools.gradient[own], dtype)
    assert bool((batch.pools.gradient[~own] == 1).all())


def test_lora_written_and_not_added(dtype: torch.dtype, device: str) -> None:
    batch = make_batch(MIXES["one trains nothing"], 40, (24, 40, 8), dtype, device)
    site, parts, values = batch.site, batch.segments, batch.pools.values
    u = torch.randn(parts.num_tokens, 3 * site.padded_rank, device=device).to(dtype)
    for width, put in ((72, lora_out_triton), (40, lora_back_triton)):
        added = torch.zeros(parts.num_tokens, width, dtype=dtype, device=device)
        written = torch.empty_like(added)
        put(u, values, added, site, parts)
        put(u, values, written, site, parts, add=False)
        assert torch.equal(added, written)


def test_lora_linear_whole(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(MIXES["mixed"], 40, (24, 40, 8), dtype, device)
    theirs = wide(batch)
    site, parts, own = batch.site, batch.segments, batch.owned
    x = torch.randn(parts.num_tokens, 80, device=device).to(dtype).requires_grad_()
    residual = torch.randn(parts.num_tokens, 72, device=device).to(dtype)
    dy = torch.randn_like(residual)
    x_wide = x.detach().float().requires_grad_()
    expected = residual.float() + lora_linear_ref(
        silu_mul_ref(x_wide), theirs.weight, None, site, theirs.pools.values, parts
    )
    monkeypatch.setattr(lora, "use_triton", lambda _: True)
    y = lora_linear(
        x, batch.weight, None, site, batch.pools, parts, before=SiluMul(), residual=residual
    )
    assert_near(y, expected, dtype)
    y.backward(dy)
    expected.backward(dy.float())
    assert x.grad is not None and x_wide.grad is not None
    assert_near(x.grad, x_wide.grad, dtype)
    assert bool(batch.pools.gradient[own].isfinite().all())


def test_gradients_alone_and_in_company_are_equal_to_the_bit(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "CHUNK", 16)
    runs = MIXES["mixed"]
    together = make_batch(runs, 40, (24, 40, 8), dtype, device)
    x = torch.randn(together.segments.num_tokens, 40, device=device).to(dtype)
    y, dy = torch.randn(2, len(x), 72, device=device).to(dtype)
    both_passes(together, x, y.clone(), dy, None, monkeypatch, triton=True)
    for number in range(len(runs)):
        only = [r if i == number else dataclasses.replace(r, tokens=0) for i, r in enumerate(runs)]
        alone = make_batch(only, 40, (24, 40, 8), dtype, device)
        own = slice(*together.segments.bounds[number : number + 2])
        both_passes(alone, x[own], y[own].clone(), dy[own], None, monkeypatch, triton=True)
        pools = alone.pools
        changed = pools.gradient != 1
        assert torch.equal(pools.gradient[changed], together.pools.gradient[changed])


@pytest.mark.parametrize("width", [16, 100])
def test_rms_norm_backward(width: int, dtype: torch.dtype, device: str) -> None:
    x, dy, added = torch.randn(3, 5, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    for extra in (None, added):
        out = rms_norm_backward_triton(x, weight, 1e-5, dy, extra)
        parts = [t.float() for t in (x, weight, dy)]
        expected = rms_norm_backward_torch(
            parts[0], parts[1], 1e-5, parts[2], None if extra is None else extra.float()
        )
        assert_near(out, expected, dtype)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_silu_mul_backward(is_gelu: bool, dtype: torch.dtype, device: str) -> None:
    gate_up = torch.randn(3, 74, device=device).to(dtype)
    dy = torch.randn(3, 37, device=device).to(dtype)
    expected = silu_mul_backward_torch(gate_up.float(), dy.float(), is_gelu)
    product = silu_mul_whole(gate_up.float(), is_gelu)
    assert_near(silu_mul_backward_triton(gate_up, dy, is_gelu=is_gelu), expected, dtype)
    # In place of what it reads.
    assert (
        silu_mul_backward_triton(gate_up, dy, out=gate_up, product=dy, is_gelu=is_gelu) is gate_up
    )
    assert_near(gate_up, expected, dtype)
    assert_near(dy, product, dtype)


@pytest.mark.parametrize("pairs", [None, Pairs(4, is_interleaved=False), Pairs(4, True)])
@pytest.mark.parametrize("dim", [8, 12])
def test_rotate(dim: int, pairs: Pairs | None, dtype: torch.dtype, device: str) -> None:
    rows = make_rows([5, 1, 37], device)
    angles = torch.randn(37, dim // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    packed = torch.randn(43, 5, dim, device=device).to(dtype)
    x = packed[:, 1:4]
    for back in (False, True):
        expected = rotate(x.float(), cos, sin, rows.positions, back, pairs=pairs)
        got = rotate_triton(x, cos, sin, rows.positions, back, pairs=pairs)
        assert_near(got, expected, dtype)
    others = packed[:, [0, 4]].clone()
    assert rotate_triton(x, cos, sin, rows.positions, True, out=x, pairs=pairs) is x
    assert_near(x, expected, dtype)
    assert torch.equal(packed[:, [0, 4]], others)


@pytest.mark.parametrize("vocabulary", [7, 64, 300])
def test_loss_and_gradient(vocabulary: int, dtype: torch.dtype, device: str) -> None:
    logits = (torch.randn(5, vocabulary, device=device) * 4).to(dtype)
    logits[1] -= 100
    expected = logits.float().clone()
    targets = torch.randint(vocabulary, (5,), device=device)
    weights = torch.rand(5, device=device)
    expected_losses = loss_and_gradient_torch(expected, targets, weights)
    losses = loss_and_gradient_triton(logits, targets, weights, block=64)
    assert_near(losses, expected_losses, torch.float32)
    assert_near(logits, expected, dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_adamw(shared: bool, device: str) -> None:
    sizes = [1024, 6144, 2048, 1024]
    bounds = [0, 2048, 9216, 11264]  # the second run's neighbour is nobody's
    total = 13312
    torch.manual_seed(0)
    master, mean, gradient = torch.randn(3, total, device=device)
    square = torch.rand(total, device=device)
    gradient[9300] = math.inf
    gradient[bounds[3] + 5] = math.nan
    values = master if shared else master.bfloat16()
    ours = Pools(values, master, mean, square, gradient)
    cloned = [t.cpu().clone() for t in (master, mean, square, gradient)]
    theirs = Pools(cloned[0] if shared else values.cpu().clone(), *cloned)
    runs = [
        RunStep(first=first, size=size, step=1 + i, lr=10.0**-i, weight_decay=0.1 * i,
                max_norm=(math.inf, 0.5, 1.0, 1.0)[i], eps=1e-8 if i else 1e-3)
        for i, (first, size) in enumerate(zip(bounds, sizes, strict=True))
    ]  # fmt: skip
    norms = adamw_triton(ours, runs)
    expected = adamw_torch(theirs, runs)
    assert norms.isfinite().tolist() == [True, True, False, False]
    assert_near(norms[:2].cpu(), expected[:2], torch.float32)
    for name in ("values", "master", "first_moment", "second_moment", "gradient"):
        out = getattr(ours, name)
        assert_near(out.cpu(), getattr(theirs, name), out.dtype)
    left = slice(9216, 12288)
    assert torch.equal(master[left].cpu(), theirs.master[left])


@pytest.mark.parametrize("dim", [64, 128, 256, 20])
@pytest.mark.parametrize("window", [None, 7])
def test_attention(dim: int, window: int | None, dtype: torch.dtype, device: str) -> None:
    """Ours or FlashAttention on a card, each row on its own on a CPU."""
    rows = make_rows([33, 1, 0, 190, 5], device)
    packed = torch.randn(229, 12, dim, device=device).to(dtype).requires_grad_()
    wide_packed = packed.detach().float().requires_grad_()
    out = attention(packed[:, :8], packed[:, 8:10], packed[:, 10:], rows, window=window)
    expected = attention_ref(
        wide_packed[:, :8], wide_packed[:, 8:10], wide_packed[:, 10:], rows, dim**-0.5, window
    )
    assert_near(out, expected, dtype)
    dy = torch.randn_like(out)
    out.backward(dy)
    expected.backward(dy.float())
    assert packed.grad is not None and wide_packed.grad is not None
    assert_near(packed.grad, wide_packed.grad, dtype)


@pytest.mark.parametrize(
    ("heads", "dim", "window"),
    [((4, 1), 32, None), ((2, 2), 20, 7), ((3, 1), 32, 7), ((8, 1), 128, None)],
)
def test_attention_triton(
    heads: tuple[int, int], dim: int, window: int | None, dtype: torch.dtype, device: str
) -> None:
    rows = make_rows([33, 1, 0, 50, 5], device)
    num_heads, num_kv = heads
    packed = torch.randn(89, num_heads + 2 * num_kv, dim, device=device).to(dtype)
    wide_packed = packed.double().requires_grad_()
    split = [num_heads, num_kv, num_kv]
    options = {"block_m": 32, "block_n": 16} if device == "cpu" else {}
    out, lse = attention_forward_triton(
        *packed.split(split, dim=1), rows, dim**-0.5, window, **options
    )
    expected = attention_ref(*wide_packed.split(split, dim=1), rows, dim**-0.5, window)
    assert_near(out, expected, dtype)
    dy = torch.randn_like(out)
    expected.backward(dy.double())
    gradient = torch.empty_like(packed)
    options = {**options, "key_m": 32, "key_n": 16} if device == "cpu" else {}
    attention_backward_triton(
        dy, *packed.split(split, dim=1), out, lse, gradient.split(split, dim=1), rows,
        dim**-0.5, window, **options,
    )  # fmt: skip
    assert wide_packed.grad is not None
    assert_near(gradient, wide_packed.grad, dtype)
