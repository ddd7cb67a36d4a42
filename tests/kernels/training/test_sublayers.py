"""The halves of a layer compute what the single operations do, kept or computed again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import gelu

from kernels.fp8 import Fp8Matrix, quantize_matrix
from kernels.int4 import Int4Matrix, pack_int4
from kernels.training import (
    Heads,
    LoraWeight,
    Norm,
    Pools,
    Rows,
    attention_sublayer,
    lora,
    lora_silu,
    make_rows,
    mlp_sublayer,
)
from kernels.training.reference import (
    attention_ref,
    lora_linear_ref,
    rms_norm_ref,
    rope_ref,
    silu_mul_ref,
)
from tests.kernels.training.cases import MIXES, Batch, Run, make_batch

HIDDEN, DIM, INNER = 24, 8, 40
#: qkv of 4 and 2 heads, and o; gate_up and down.
ATTENTION = ((HIDDEN, (32, 16, 16)), (32, (HIDDEN,)))
MLP = ((HIDDEN, (INNER, INNER)), (INNER, (HIDDEN,)))
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def make(runs: list[Run], shapes: tuple, dtype: torch.dtype, device: str = "cpu") -> Batch:
    return make_batch(runs, *shapes[0], dtype, device, others=shapes[1:])


def parts(batch: Batch) -> list[LoraWeight]:
    together = zip(batch.weights, batch.biases, batch.sites, strict=True)
    return [LoraWeight(weight, bias, site) for weight, bias, site in together]


def rows_of(batch: Batch, device: str = "cpu") -> Rows:
    """Each run's tokens in two rows."""
    lengths = []
    for start, end in zip(batch.segments.bounds, batch.segments.bounds[1:], strict=False):
        lengths += [(end - start) // 2, end - start - (end - start) // 2]
    return make_rows(lengths, device)


def make_heads(dtype: torch.dtype, device: str, window: int | None, normed: bool) -> Heads:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.randn(64, DIM // 2, dtype=wide, device=device).repeat(1, 2)
    weights = torch.randn(2, DIM, dtype=wide, device=device).to(dtype) if normed else None
    return Heads(
        num_heads=4, num_kv_heads=2, dim=DIM, cos=angles.cos(), sin=angles.sin(), window=window,
        qk_norm=weights, eps=1e-5,
    )  # fmt: skip


def attention_half_ref(
    hidden: torch.Tensor, weight: torch.Tensor, batch: Batch, heads: Heads, rows: Rows,
    values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    weights, biases, sites = batch.weights, batch.biases, batch.sites
    normed = rms_norm_ref(hidden, weight, 1e-5)
    qkv = lora_linear_ref(normed, weights[0], biases[0], sites[0], values, batch.segments)
    q, k, v = heads.split(qkv)
    if heads.qk_norm is not None:
        q, k = (rms_norm_ref(x, w, 1e-5) for x, w in zip((q, k), heads.qk_norm, strict=True))
    q, k = (rope_ref(x, heads.cos, heads.sin, rows.positions) for x in (q, k))
    out = attention_ref(q, k, v, rows, DIM**-0.5, heads.window).flatten(1)
    return hidden + lora_linear_ref(out, weights[1], biases[1], sites[1], values, batch.segments)


def mlp_half_ref(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    batch: Batch,
    values: torch.Tensor,
    out_norm: torch.Tensor | None,
) -> torch.Tensor:
    """With a norm after it, it is GELU, too."""
    weights, biases, sites = batch.weights, batch.biases, batch.sites
    normed = rms_norm_ref(hidden, weight, 1e-5)
    both = lora_linear_ref(normed, weights[0], biases[0], sites[0], values, batch.segments)
    if out_norm is None:
        inner = silu_mul_ref(both)
    else:
        gate, up = both.chunk(2, dim=-1)
        inner = gelu(gate, approximate="tanh") * up
    out = lora_linear_ref(inner, weights[1], biases[1], sites[1], values, batch.segments)
    return hidden + (out if out_norm is None else rms_norm_ref(out, out_norm, 1e-5))


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (out.double() - expected.double()).norm() / (expected.double().norm() + 1e-9)
    assert out.shape == expected.shape
    assert error.item() <= TOLERANCE[dtype]


def in_double(batch: Batch) -> Batch:
    fields = {name: getattr(batch.pools, name).double() for name in Pools.__dataclass_fields__}
    return dataclasses.replace(
        batch,
        weights=[weight.double() for weight in batch.weights],
        biases=[bias.double() for bias in batch.biases],
        pools=Pools(**fields),
    )


def check(
    y: torch.Tensor, hidden: torch.Tensor, expected: torch.Tensor, wide: torch.Tensor,
    batch: Batch, values: torch.Tensor, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Value, gradient of the input, gradients of the factors, and nothing else written."""
    assert_near(y, expected, dtype)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    assert hidden.grad is not None and wide.grad is not None and values.grad is not None
    assert_near(hidden.grad, wide.grad, dtype)
    own = batch.owned
    assert_near(batch.pools.gradient[own], values.grad[own] + 1, dtype)
    assert bool((batch.pools.gradient[~own] == 1).all())


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("window", "normed"), [(None, False), (3, False), (None, True)])
@pytest.mark.parametrize("mix", ["mixed", "one token", "nobody trains", "one trains nothing"])
def test_attention(mix: str, window: int | None, normed: bool, keep: bool) -> None:
    check_attention(mix, window, normed, keep, torch.float64, "cpu")


def check_attention(
    mix: str, window: int | None, normed: bool, keep: bool, dtype: torch.dtype, device: str
) -> None:
    batch = make(MIXES[mix], ATTENTION, dtype, device)
    heads, rows = make_heads(dtype, device, window, normed), rows_of(batch, device)
    hidden = torch.randn(batch.segments.num_tokens, HIDDEN, dtype=torch.float64, device=device)
    hidden = hidden.to(dtype).requires_grad_()
    weight = torch.randn(HIDDEN, device=device).to(dtype)
    y = attention_sublayer(
        hidden, Norm(weight, 1e-5), *parts(batch), heads, batch.pools, batch.segments, rows,
        keep=keep,
    )  # fmt: skip
    theirs, wide = in_double(batch), hidden.detach().double().requires_grad_()
    values = theirs.pools.values.requires_grad_()
    norms = None if heads.qk_norm is None else heads.qk_norm.double()
    heads = dataclasses.replace(
        heads, cos=heads.cos.double(), sin=heads.sin.double(), qk_norm=norms
    )
    expected = attention_half_ref(wide, weight.double(), theirs, heads, rows, values)
    check(y, hidden, expected, wide, batch, values, dtype)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("is_other", [False, True], ids=["llama", "gemma"])
@pytest.mark.parametrize("mix", MIXES)
def test_mlp(mix: str, is_other: bool, keep: bool) -> None:
    check_mlp(mix, keep, torch.float64, "cpu", is_other)


def check_mlp(
    mix: str, keep: bool, dtype: torch.dtype, device: str, is_other: bool = False
) -> None:
    """is_other: with GELU, and a norm after it"""
    batch = make(MIXES[mix], MLP, dtype, device)
    hidden = torch.randn(batch.segments.num_tokens, HIDDEN, dtype=torch.float64, device=device)
    hidden = hidden.to(dtype).requires_grad_()
    weight = torch.randn(HIDDEN, device=device).to(dtype)
    out_norm = torch.randn(HIDDEN, device=device).to(dtype) if is_other else None
    y = mlp_sublayer(
        hidden, Norm(weight, 1e-5), *parts(batch), batch.pools, batch.segments, keep=keep,
        out_norm=Norm(out_norm, 1e-5), is_gelu=is_other,
    )  # fmt: skip
    theirs, wide = in_double(batch), hidden.detach().double().requires_grad_()
    values = theirs.pools.values.requires_grad_()
    own = None if out_norm is None else out_norm.double()
    expected = mlp_half_ref(wide, weight.double(), theirs, values, own)
    check(y, hidden, expected, wide, batch, values, dtype)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("mix", ["mixed", "one trains nothing", "eights"])
def test_triton_halves(
    mix: str, keep: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same halves of Triton kernels."""
    monkeypatch.setattr(lora, "use_triton", lambda _: True)
    monkeypatch.setattr(lora_silu, "use_triton", lambda _: True)
    for is_other in (False, True):
        check_mlp(mix, keep, dtype, device, is_other)
    check_attention(mix, None, False, keep, dtype, device)


def test_what_is_not_a_number_stays_in_its_run(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "use_triton", lambda _: True)
    monkeypatch.setattr(lora_silu, "use_triton", lambda _: True)
    for shapes in (ATTENTION, MLP):
        batch = make(MIXES["eights"], shapes, torch.float32, device)
        start, end = batch.segments.bounds[1:3]
        hidden = torch.randn(batch.segments.num_tokens, HIDDEN, device=device)
        hidden[start:end] = float("nan")
        hidden.requires_grad_()
        norm = Norm(torch.ones(HIDDEN, device=device), 1e-5)
        if shapes is MLP:
            y = mlp_sublayer(hidden, norm, *parts(batch), batch.pools, batch.segments)
        else:
            heads, rows = make_heads(torch.float32, device, None, False), rows_of(batch, device)
            y = attention_sublayer(
                hidden, norm, *parts(batch), heads, batch.pools, batch.segments, rows
            )
        y.backward(torch.randn_like(y))
        assert hidden.grad is not None
        for rows_out in (y.detach(), hidden.grad):
            is_bad = rows_out.isnan().any(dim=1)
            assert is_bad.nonzero()[:, 0].tolist() == list(range(start, end))
        bad = batch.pools.gradient.isnan()
        first = int(bad.nonzero().min())
        last = int(bad.nonzero().max())
        [site, *_] = batch.sites
        assert first >= int(site.a[0, 1]) and last < int(site.a[0, 2])


@pytest.mark.parametrize("precision", ["FP8", "4 bits"])
def test_a_quantised_weight_is_what_serving_multiplies_by(precision: str) -> None:
    matrix: Fp8Matrix | Int4Matrix = quantize_matrix(torch.randn(24, 32))
    if precision == "4 bits":
        numbers, zero = torch.randint(16, (24, 32)), torch.randint(16, (2, 24), dtype=torch.uint8)
        matrix = Int4Matrix(pack_int4(numbers), torch.rand(2, 24), zero)
    bias, x, dy = torch.randn(24), torch.randn(5, 32), torch.randn(5, 24)
    weight = LoraWeight(
        matrix, bias, parts(make(next(iter(MIXES.values())), MLP, torch.float32))[0].site
    )
    torch.testing.assert_close(weight.times(x), x @ matrix.dense().T + bias)
    torch.testing.assert_close(weight.back(dy), dy @ matrix.dense())
