"""Each operation of a training step at Llama-3.1-8B's shape: its time, and what bounds it.

`bound_ms` is the time that the bytes take at the card's copy rate, or the products at the rate of a
large product, whichever is longer; `share` is that over the time taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.device import graph_ms
from bench.training_stack import EPS, Shape, Work, randn, site_of
from kernels.rms_norm import rms_norm_triton
from kernels.silu_mul import silu_mul_triton
from kernels.training import RunStep, make_rows, make_segments
from kernels.training.adamw import adamw_triton
from kernels.training.attention import Options, flash_backward, flash_forward
from kernels.training.attention_triton import attention_backward_triton, attention_forward_triton
from kernels.training.cross_entropy import loss_and_gradient_triton
from kernels.training.lora_both import lora_backward_b_triton
from kernels.training.lora_gradient import add_a_gradient_triton
from kernels.training.lora_silu import lora_silu_backward_triton, lora_silu_triton
from kernels.training.lora_triton import (
    lora_back_triton,
    lora_in_triton,
    lora_out_triton,
)
from kernels.training.norms import rms_norm_backward_triton
from kernels.training.rope import rotate_triton
from kernels.training.silu import silu_mul_backward_triton

COPY_TB_S, TFLOP_S = 4.2, 700.0
SITES = ("qkv", "o", "gate_up", "down")
Line = dict[str, Any]
Timed = tuple[str, Callable[[], object], float, float]  # name, run, bytes, flops


def products(shape: Shape, work: Work) -> Iterator[Timed]:
    """The base's matrices: forward, back, and back with the sum in the product's epilogue."""
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    for site, bounds, width in zip(SITES, shape.bounds, shape.widths, strict=True):
        out = bounds[-1]
        x, dy = randn(work.tokens, width, like=like), randn(work.tokens, out, like=like)
        weight = randn(out, width, like=like, deviation=width**-0.5)
        flops, moved = 2.0 * work.tokens * width * out, 2.0 * (x.numel() + dy.numel())
        y, dx = torch.empty_like(dy), torch.empty_like(x)
        yield f"mm {site}", lambda: torch.mm(x, weight.T, out=y), moved, flops
        yield f"mm+= {site}", lambda: y.addmm_(x, weight.T), moved, flops
        yield f"mm back {site}", lambda: torch.mm(dy, weight, out=dx), moved, flops
        yield f"mm+= back {site}", lambda: dx.addmm_(dy, weight), moved, flops


TRIES: dict[str, list[dict[str, int]]] = {
    "in": [
        {}, {"block_t": 128, "num_warps": 8}, {"block_k": 64, "num_stages": 4}, {"block_t": 32},
        {"block_k": 256, "num_stages": 2},
    ],
    "out": [{}, {"num_warps": 2}, {"block_t": 64}, {"block_n": 256}],
    "back": [{}, {"block_t": 32}, {"num_warps": 8}],
    "both": [{}, {"block_n": 128}],
    "da": [
        {}, {"block_n": 64}, {"block_t": 128}, {"block_t": 32}, {"block_n": 256, "num_warps": 8},
    ],
}  # fmt: skip


def adapters(shape: Shape, work: Work) -> Iterator[Timed]:
    """The segmented products of each site; several ways where it is large."""
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    segments = make_segments([work.rows * work.length] * work.runs, "cuda")
    name = f"{work.runs} runs"
    for index, site_name in enumerate(SITES):
        site, pools = site_of(shape, work, index, "cuda")
        width, out = shape.widths[index], shape.bounds[index][-1]
        x, y = randn(work.tokens, width, like=like), randn(work.tokens, out, like=like)
        u = randn(work.tokens, site.num_modules * site.padded_rank, like=like)
        gradient_bytes = 8.0 * work.runs * work.rank
        steps: dict[str, tuple[Callable[..., object], float]] = {
            "in": (lambda **o: lora_in_triton(x, pools.values, site, segments, **o), 2 * x.numel()),
            "out": (
                lambda **o: lora_out_triton(u, pools.values, y, site, segments, **o),
                4 * y.numel(),
            ),
            "out written": (
                lambda **o: lora_out_triton(u, pools.values, y, site, segments, add=False, **o),
                2 * y.numel(),
            ),
            "back": (
                lambda **o: lora_back_triton(u, pools.values, x, site, segments, **o),
                4 * x.numel(),
            ),
            "da": (
                lambda **o: add_a_gradient_triton(u, x, pools.gradient, site, segments, **o),
                2 * x.numel() + gradient_bytes * width * site.num_modules,
            ),
            "both": (
                lambda **o: lora_backward_b_triton(
                    u, y, pools.values, pools.gradient, site, segments, **o
                ),
                2 * y.numel() + gradient_bytes * out,
            ),
        }
        for step, (run, moved) in steps.items():
            # Each way is compiled; two sites show what the others want.
            ways = TRIES.get(step, [{}]) if site_name in ("qkv", "gate_up") else [{}]
            for way in ways if work.runs > 1 else [{}]:
                yield (
                    f"lora {step} {site_name} {name} {label(way)}",
                    lambda run=run, way=way: run(**way),
                    moved,
                    0.0,
                )


def elementwise(shape: Shape, work: Work) -> Iterator[Timed]:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    x, dy = (randn(work.tokens, shape.hidden, like=like) for _ in range(2))
    weight = torch.ones(shape.hidden, dtype=like.dtype, device="cuda")
    size = 2.0 * x.numel()
    yield "norm", lambda: rms_norm_triton(x, weight, EPS), 2 * size, 0.0
    back = rms_norm_backward_triton
    yield "norm back", lambda: back(x, weight, EPS, dy), 3 * size, 0.0
    yield "norm back added", lambda: back(x, weight, EPS, dy, dy), 4 * size, 0.0
    gate_up = randn(work.tokens, 2 * shape.inner, like=like)
    dh = randn(work.tokens, shape.inner, like=like)
    size = 2.0 * dh.numel()
    yield "silu", lambda: silu_mul_triton(gate_up), 3 * size, 0.0
    yield "silu back", lambda: silu_mul_backward_triton(gate_up, dh), 5 * size, 0.0
    both = torch.empty_like(gate_up)
    yield from fused_silus(shape, work, gate_up, dh)
    yield (
        "silu back and again",
        lambda: silu_mul_backward_triton(gate_up, dh, out=both, product=dh),
        6 * size, 0.0,
    )  # fmt: skip
    logits = randn(4096, shape.vocabulary, like=like)
    targets = torch.zeros(4096, dtype=torch.int64, device="cuda")
    weights = torch.ones(4096, device="cuda")
    for block in (2048, 4096, 8192):
        yield (
            f"loss of 4096 block={block}",
            lambda block=block: loss_and_gradient_triton(logits, targets, weights, block=block),
            6.0 * logits.numel(), 0.0,
        )  # fmt: skip
    head = randn(shape.vocabulary, shape.hidden, like=like, deviation=0.02)
    picked = x[:4096]
    flops = 2.0 * picked.numel() * shape.vocabulary
    yield "mm head", lambda: torch.mm(picked, head.T, out=logits), 0.0, flops
    yield "mm back head", lambda: torch.mm(logits, head), 0.0, flops


SILU_TRIES: list[dict[str, int]] = [
    {}, {"block_n": 64}, {"block_n": 128}, {"block_t": 64, "block_n": 64},
    {"block_t": 64, "block_n": 64, "num_warps": 8}, {"block_t": 16, "block_n": 128},
    {"block_t": 32, "block_n": 64, "num_warps": 2}, {"block_t": 64, "block_n": 32},
]  # fmt: skip


def fused_silus(
    shape: Shape, work: Work, gate_up: torch.Tensor, dh: torch.Tensor
) -> Iterator[Timed]:
    """The activation beside its adapters, forward and backward."""
    site, pools = site_of(shape, work, 2, "cuda")
    down, _ = site_of(shape, work, 3, "cuda")
    segments = make_segments([work.rows * work.length] * work.runs, "cuda")
    u = randn(work.tokens, 2 * site.padded_rank, like=dh)
    du = randn(work.tokens, site.padded_rank, like=dh)
    values, size = pools.values, 2.0 * dh.numel()
    for way in SILU_TRIES:
        yield (
            f"lora silu {label(way)}",
            lambda way=way: lora_silu_triton(gate_up, u, values, site, segments, **way),
            3 * size, 0.0,
        )  # fmt: skip
        yield (
            f"lora silu back {label(way)}",
            lambda way=way: lora_silu_backward_triton(
                gate_up, dh, u, du, values, site, down, segments, **way
            ),
            6 * size, 0.0,
        )  # fmt: skip


FORWARD_TRIES: list[dict[str, int]] = [{}, {"num_stages": 4}, {"block_n": 16, "num_stages": 4}]
BACKWARD_TRIES: list[dict[str, int]] = [
    {}, {"num_stages": 2}, {"block_m": 128, "num_warps": 8}, {"key_m": 32, "key_stages": 3},
]  # fmt: skip


def label(way: dict[str, int]) -> str:
    return " ".join(f"{key}={value}" for key, value in way.items())


def attentions(shape: Shape, work: Work) -> Iterator[Timed]:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    for length in (256, 1024):
        rows = make_rows([length] * (work.tokens // length), "cuda")
        packed = randn(work.tokens, shape.heads + 2 * shape.kv_heads, shape.dim, like=like)
        heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        q, k, v = packed.split(heads, dim=1)
        dy = randn(work.tokens, shape.heads, shape.dim, like=like)
        options = Options(rows, shape.dim**-0.5, None)
        flops = 2.0 * work.tokens * length * shape.heads * shape.dim
        size = 2.0 * packed.numel()
        yield (
            f"attention rows of {length}",
            lambda q=q, k=k, v=v, options=options: flash_forward(q, k, v, options),
            size + 2 * dy.numel(), flops,
        )  # fmt: skip
        kept = (q, k, v, flash_forward(q, k, v, options), options)

        out, lse = attention_forward_triton(q, k, v, rows, options.scale, None)
        gradients = torch.empty_like(packed).split(heads, dim=1)
        ours = (dy, q, k, v, out, lse, gradients, rows, options.scale, None)
        for way in FORWARD_TRIES:
            yield (
                f"our attention rows of {length} {label(way)}",
                lambda a=ours, way=way: attention_forward_triton(*a[1:4], *a[7:], **way),
                size + 2 * dy.numel(), flops,
            )  # fmt: skip
        for way in BACKWARD_TRIES:
            yield (
                f"our attention back rows of {length} {label(way)}",
                lambda a=ours, way=way: attention_backward_triton(*a, **way),
                2 * size + 4 * dy.numel(), 2.5 * flops,
            )  # fmt: skip

        def back(dy: torch.Tensor = dy, kept: Any = kept) -> object:
            return flash_backward(dy, *kept)

        def exact(back: Callable[[], object] = back) -> object:
            torch.utils.deterministic.fill_uninitialized_memory = False
            torch._C._set_deterministic_algorithms(True, warn_only=False)
            try:
                return back()
            finally:
                torch._C._set_deterministic_algorithms(False)

        yield f"attention back rows of {length}", back, 2 * size + 4 * dy.numel(), 2.5 * flops
        yield f"attention back exact {length}", exact, 2 * size + 4 * dy.numel(), 2.5 * flops
    positions = rows.positions
    cos = torch.randn(1024, shape.dim, device="cuda")
    both = packed[:, : shape.heads + shape.kv_heads]
    yield (
        "rotate q and k in place",
        lambda: rotate_triton(both, cos, cos, positions, False, out=both),
        4.0 * both.numel(), 0.0,
    )  # fmt: skip


def time_adamw(shape: Shape) -> Line:
    """The update of 16 runs of an 8B's size; it uploads its numbers, so no graph holds it."""
    work = Work(16, 1, 256)
    _, pools = site_of(shape, work, 0, "cuda")
    size = len(pools.values) // work.runs
    runs = [RunStep(first=i * size, size=size, step=1, lr=1e-4) for i in range(work.runs)]
    times = []
    for _ in range(6):
        pools.gradient.normal_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        adamw_triton(pools, runs)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    moved = len(pools.values) * (4 + 4 + 8 + 8 + 8 + 4 + 2)
    bound = moved / COPY_TB_S / 1e9
    ms = min(times)
    return {"op": f"adamw of {len(pools.values) / 1e6:.0f} M", "ms": round(ms, 3),
            "bound_ms": round(bound, 3), "share": round(bound / ms, 2)}  # fmt: skip


def bench_operations(only: str, share: tuple[int, int], compile_only: bool) -> Iterator[Line]:
    """Time operations whose name has one of `only` in it; of `share` (i, n) each n-th from i."""
    shape, many, one = Shape(), Work(64, 1, 256), Work(1, 64, 256)
    groups = {
        "mm": lambda: products(shape, many),
        "lora": lambda: adapters(shape, many),
        "lora one": lambda: adapters(shape, one),
        "element": lambda: elementwise(shape, many),
        "attention": lambda: attentions(shape, many),
    }
    number = 0
    for group in groups.values():
        for name, run, moved, flops in group():
            number += 1
            wanted = any(each in name for each in only.split(","))
            if not wanted or number % share[1] != share[0]:
                continue
            try:
                if compile_only:
                    run()
                    continue
                ms = graph_ms(run, repeats=6, rounds=3)
            except Exception as failure:
                yield {"op": name, "failed": f"{type(failure).__name__}: {failure}"[:300]}
                continue
            bound = max(moved / COPY_TB_S / 1e9, flops / TFLOP_S / 1e9)
            line = {"op": name, "ms": round(ms, 4), "bound_ms": round(bound, 4)}
            line["share"] = round(bound / ms, 2)
            if flops:
                line["tflop_s"] = round(flops / ms / 1e9)
            yield line
        torch.cuda.empty_cache()
    if not compile_only and any(each in "adamw" for each in only.split(",")):
        yield time_adamw(shape)
