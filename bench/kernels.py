"""Check each operation against its reference at the shapes of Llama-3.1-8B, then time it.

    python -m bench.kernels [--only linear,lora,attention] [--out FILE]

Prints one JSON line per case: the bytes that must move, the time, GB/s (or TFLOP/s), the share of
the GPU's copy bandwidth, the relative error. An operation with a wrong result is not timed.
Operands rotate, so that no run finds its data in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from bench.device import graph_ms, provenance
from kernels import LoraBatch, LoraTable, PageLayout
from kernels.attention import paged_attention_ref
from kernels.attention_decode import DecodeWorkspace, attention_decode_triton
from kernels.attention_prefill import attention_prefill_triton
from kernels.gate_up import gate_up_silu_ref, gate_up_silu_triton
from kernels.linear import skinny_linear_triton
from kernels.lora import block_of, lora_expand_ref, lora_shrink_ref
from kernels.lora_expand import lora_expand_triton
from kernels.lora_expand_decode import lora_expand_decode_triton
from kernels.lora_plan import make_plan
from kernels.lora_shrink import lora_shrink_triton
from kernels.rms_norm import add_rms_norm_ref, add_rms_norm_triton
from kernels.sampling import greedy_triton
from kernels.silu_mul import silu_mul_ref, silu_mul_triton

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
WIDTHS = (
    (HIDDEN, HIDDEN), (HIDDEN, 1024), (HIDDEN, 1024), (HIDDEN, HIDDEN),
    (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN),
)  # fmt: skip
SITES = {"qkv": (0, 1, 2), "o": (3,), "gate_up": (4, 5), "down": (6,)}
Case = dict[str, Any]


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def rotate(run: Callable[[int], object], copies: int) -> Callable[[], object]:
    """Call `run` with 0, 1, ... copies - 1, over and over."""
    turn = itertools.cycle(range(copies))
    return lambda: run(next(turn))


def bench_linear(tokens: tuple[int, ...]) -> Iterator[Case]:
    """Time torch's product and the kernel for few rows."""
    shapes = {
        "qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER), "lm_head": (VOCAB, HIDDEN),
    }  # fmt: skip
    options = [
        (16, 256, 5, 4), (16, 512, 3, 4), (32, 128, 6, 4), (32, 256, 3, 4), (32, 256, 4, 8),
        (64, 128, 4, 4), (64, 128, 3, 4), (64, 256, 2, 4), (128, 64, 5, 4), (128, 128, 3, 8),
    ]  # fmt: skip
    for site, (out_width, width) in shapes.items():
        copies = max(2, int(6e8 / (2 * out_width * width)))
        weights = [randn(out_width, width) / width**0.5 for _ in range(copies)]
        for count in tokens:
            x = randn(count, width)
            expected = x.float() @ weights[0].float().T
            base = {"op": "linear", "site": site, "tokens": count}
            num_bytes = 2 * (weights[0].numel() + x.numel() + expected.numel())
            ms = graph_ms(rotate(lambda i: functional.linear(x, weights[i]), copies), 2 * copies)
            yield base | {"by": "library", "ms": ms, "gb_s": num_bytes / ms / 1e6}
            if count > 64:
                continue
            for block_n, block_k, stages, warps in options:

                def run(i: int, x: torch.Tensor = x) -> torch.Tensor:
                    return skinny_linear_triton(
                        x, weights[i], block_n=block_n, block_k=block_k,
                        num_warps=warps, num_stages=stages,
                    )  # fmt: skip

                by = f"n{block_n} k{block_k} s{stages} w{warps}"
                try:
                    wrong = error(run(0), expected)
                    ms = graph_ms(rotate(run, copies), 2 * copies)
                except Exception as failure:
                    # For example, its tiles need too much shared memory; the others still count.
                    yield base | {"by": by, "failed": str(failure)[:80]}
                    continue
                yield base | {"by": by, "ms": ms, "gb_s": num_bytes / ms / 1e6, "error": wrong}


def make_lora(num_adapters: int, ranks: list[int], layers: int) -> tuple[torch.Tensor, LoraTable]:
    """Make an arena of random adapters on all projections, and its table."""
    starts, counts, a_offsets, b_offsets, rows = [], [], [], [], []
    size = 0
    for v in range(num_adapters):
        rank = ranks[v % len(ranks)]
        tiles = -(-rank // 8)
        starts.append(len(rows))
        counts.append(tiles)
        for _ in range(layers):
            for n_in, n_out in WIDTHS:
                for offsets, width in ((a_offsets, n_in), (b_offsets, n_out)):
                    for t in range(tiles):
                        offsets.append(size)
                        size += min(8, rank - 8 * t) * width
                rows += [min(8, rank - 8 * t) for t in range(tiles)]
    arena = torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02
    table = LoraTable(
        entry_start=torch.tensor(starts, device="cuda"),
        num_tiles=torch.tensor(counts, dtype=torch.int32, device="cuda"),
        a_offset=torch.tensor(a_offsets, device="cuda"),
        b_offset=torch.tensor(b_offsets, device="cuda"),
        rows=torch.tensor(rows, dtype=torch.int32, device="cuda"),
        scale=torch.full((len(rows),), 0.5, device="cuda"),
    )
    return arena, table


def segments(tokens: int, num_adapters: int, table: LoraTable, max_tiles: int) -> LoraBatch:
    """Make a batch of `tokens` tokens in equal segments, one per adapter."""
    bounds = [tokens * i // num_adapters for i in range(num_adapters + 1)]
    return LoraBatch(
        table=table,
        seg_indptr=torch.tensor(bounds, dtype=torch.int32, device="cuda"),
        seg_adapter=torch.arange(num_adapters, dtype=torch.int32, device="cuda"),
        max_tiles=max_tiles,
    )


def bench_lora(options: bool) -> Iterator[Case]:
    """Time shrink and expand at every site; bytes are the adapters' weights."""
    cases = [
        (1, 1, [16]), (16, 16, [16]), (64, 64, [16]), (64, 1, [16]), (256, 64, [16]),
        (64, 64, [4, 8, 16, 32, 64, 128]), (16384, 16, [16]),
    ]  # fmt: skip
    for tokens, num_adapters, ranks in cases:
        layers = max(2, min(32, int(3e8 / (num_adapters * sum(ranks) / len(ranks) * 163840))))
        arena, table = make_lora(num_adapters, ranks, layers)
        lora = segments(tokens, num_adapters, table, -(-max(ranks) // 8))
        plan = make_plan(lora, tokens, block_of(tokens, num_adapters))
        total_rank = sum(ranks[v % len(ranks)] for v in range(num_adapters))
        for site, projections in SITES.items():
            base = {"site": site, "tokens": tokens, "adapters": num_adapters, "ranks": ranks}
            n_in = WIDTHS[projections[0]][0]
            bounds = tuple(itertools.accumulate((WIDTHS[p][1] for p in projections), initial=0))
            x = randn(tokens, n_in)
            y = torch.zeros(tokens, bounds[-1], device="cuda", dtype=torch.bfloat16)
            h = lora_shrink_ref(x, arena, lora, 0, projections)
            expected = torch.zeros_like(y, dtype=torch.float32)
            lora_expand_ref(h, arena, lora, 0, projections, expected, bounds)
            rows = lora_shrink_triton(x, arena, table, plan, 0, projections)
            lora_expand_triton(rows, arena, table, plan, 0, projections, y, bounds)
            wrong = error(y, expected)
            base |= {"error": wrong}
            if not wrong < 2e-2:
                yield base | {"op": "lora", "failed": "wrong"}
                continue
            a_bytes = 2 * total_rank * n_in * len(projections) + x.numel() * 2
            b_bytes = 2 * total_rank * bounds[-1] + y.numel() * 2
            tries: list[dict[str, int]] = [{}]
            if options and plan.block_t == 16:
                tries += [
                    {"block_k": 128}, {"block_k": 128, "num_stages": 3},
                    {"block_k": 128, "num_stages": 4}, {"num_stages": 3}, {"splits": 4},
                    {"splits": 8}, {"num_warps": 2}, {"num_warps": 2, "block_k": 128},
                    {"splits": 4, "block_k": 128, "num_stages": 4}, {"row_k": 0}, {"rows": 8},
                    {"row_k": 0, "num_warps": 2, "num_stages": 4},
                ]  # fmt: skip
            elif options:
                tries += [{"num_warps": 8}, {"block_k": 128}, {"num_stages": 3}, {"splits": 1},
                          {"splits": 4}]  # fmt: skip
            for extra in tries:
                ms = graph_ms(
                    rotate(
                        lambda i: lora_shrink_triton(
                            x,
                            arena,
                            table,
                            plan,
                            i,
                            projections,
                            **extra,
                        ),
                        layers,
                    ),
                    2 * layers,
                )
                yield base | {
                    "op": "shrink",
                    "by": str(extra),
                    "ms": ms,
                    "gb_s": a_bytes / ms / 1e6,
                }
            tries, expand = [{}], lora_expand_triton
            if plan.block_t == 16:
                expand = lora_expand_decode_triton
            if options and plan.block_t == 16:
                tries += [
                    {"group_n": 256, "max_registers": 168, "num_programs": 1584}, {"few": 1},
                    {"few": 4}, {"num_programs": 2112},
                ]  # fmt: skip
            elif options:
                tries += [{"num_stages": 3}, {"dot_n": 128}, {"block_n": 256}, {"block_n": 1024}]
            for extra in tries:
                ms = graph_ms(
                    rotate(
                        lambda i: expand(
                            rows, arena, table, plan, i, projections, y, bounds,
                            add=False, **extra,
                        ),
                        layers,
                    ),
                    2 * layers,
                )  # fmt: skip
                yield base | {
                    "op": "expand",
                    "by": str(extra),
                    "ms": ms,
                    "gb_s": b_bytes / ms / 1e6,
                }


def bench_attention() -> Iterator[Case]:
    """Time decodes at the targets' contexts and longer ones, and prefills of whole prompts."""
    layout = PageLayout(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM)
    for count, context in ((1, 288), (1, 8192), (16, 288), (64, 288), (256, 288), (64, 2048)):
        pages = -(-context // 16)
        arena = randn(count * pages, layout.page_elems)
        tables = torch.randperm(count * pages, device="cuda").to(torch.int32).view(count, pages)
        q = randn(count, HEADS, DIM)
        starts = torch.arange(count + 1, dtype=torch.int32, device="cuda")
        contexts = torch.full((count,), context, dtype=torch.int32, device="cuda")
        workspace = DecodeWorkspace(count, HEADS, layout, q.device)
        args = (starts, contexts, tables, DIM**-0.5)
        out = attention_decode_triton(q, arena, layout, 1, *args, workspace=workspace)
        wrong = error(out, paged_attention_ref(q, arena, layout, 1, *args))
        num_bytes = 2 * 2 * count * context * KV_HEADS * DIM
        for extra in ({}, {"num_warps": 2}, {"block_n": 128}, {"num_stages": 3}, {"min_part": 64}):
            ms = graph_ms(
                rotate(
                    lambda i: attention_decode_triton(
                        q,
                        arena,
                        layout,
                        i,
                        *args,
                        workspace=workspace,
                        **extra,
                    ),
                    2,
                )
            )
            yield {
                "op": "decode", "tokens": count, "context": context, "by": str(extra),
                "error": wrong, "ms": ms, "gb_s": num_bytes / ms / 1e6,
            }  # fmt: skip
        del arena
    count, context = 16, 1024
    arena = randn(count * 64, layout.page_elems)
    tables = torch.randperm(count * 64, device="cuda").to(torch.int32).view(count, 64)
    q = randn(count * context, HEADS, DIM)
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * context
    contexts = torch.full((count,), context, dtype=torch.int32, device="cuda")
    args = (starts, contexts, tables, DIM**-0.5)
    out = attention_prefill_triton(q, arena, layout, 1, *args, max_new=context)
    wrong = error(out, paged_attention_ref(q, arena, layout, 1, *args))
    flops = 4 * count * context * context / 2 * HEADS * DIM
    for block_m, block_n, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
        (128, 64, 4, 3), (128, 32, 8, 4),
    ):  # fmt: skip
        ms = graph_ms(
            lambda: attention_prefill_triton(
                q, arena, layout, 1, *args, max_new=context,
                block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages,
            ),
            4,
        )  # fmt: skip
        yield {
            "op": "prefill", "tokens": count * context, "error": wrong, "ms": ms,
            "by": f"m{block_m} n{block_n} w{warps} s{stages}", "tflop_s": flops / ms / 1e9,
        }  # fmt: skip


def bench_small() -> Iterator[Case]:
    """Time the operations between the matrix products."""
    for tokens in (1, 64, 256, 16384):
        x, residual = randn(tokens, HIDDEN), randn(tokens, HIDDEN)
        weight = randn(HIDDEN)
        out = add_rms_norm_triton(x, residual, weight, 1e-5)[0]
        wrong = error(out, add_rms_norm_ref(x, residual, weight, 1e-5)[0])
        ms = graph_ms(lambda: add_rms_norm_triton(x, residual, weight, 1e-5))
        yield {"op": "add_rms_norm", "tokens": tokens, "error": wrong, "ms": ms,
               "gb_s": 8 * x.numel() / ms / 1e6}  # fmt: skip
        gate_up = randn(tokens, 2 * INNER)
        wrong = error(silu_mul_triton(gate_up), silu_mul_ref(gate_up))
        ms = graph_ms(lambda: silu_mul_triton(gate_up))
        yield {"op": "silu_mul", "tokens": tokens, "error": wrong, "ms": ms,
               "gb_s": 3 * gate_up.numel() / ms / 1e6}  # fmt: skip
        if tokens >= 2048:
            weight = randn(2 * INNER, HIDDEN)
            wrong = error(gate_up_silu_triton(x, weight), gate_up_silu_ref(x, weight))
            ms = graph_ms(lambda: gate_up_silu_triton(x, weight))
            yield {"op": "gate_up_silu", "tokens": tokens, "error": wrong, "ms": ms,
                   "tflop_s": 2 * x.shape[0] * weight.numel() / ms / 1e9}  # fmt: skip
        if tokens <= 256:
            logits = randn(tokens, VOCAB)
            same = bool((greedy_triton(logits) == logits.argmax(-1)).all())
            ms = graph_ms(lambda: greedy_triton(logits))
            yield {"op": "greedy", "tokens": tokens, "error": 0.0 if same else 1.0, "ms": ms,
                   "gb_s": 2 * logits.numel() / ms / 1e6}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="small,attention,lora,linear")
    parser.add_argument("--options", action="store_true", help="time the launch options as well")
    parser.add_argument("--out", help="write the JSON lines there as well")
    arguments = parser.parse_args()
    host = provenance()
    print(json.dumps(host))
    sections: dict[str, Callable[[], Iterator[Case]]] = {
        "small": bench_small,
        "attention": bench_attention,
        "lora": lambda: bench_lora(arguments.options),
        "linear": lambda: bench_linear((1, 8, 16, 32, 64, 128, 256)),
    }
    lines = [host]
    failed = False
    for name in arguments.only.split(","):
        try:
            for case in sections[name]():
                if "gb_s" in case:
                    case["of_copy"] = round(case["gb_s"] / host["copy_tb_s"] / 1e3, 3)
                failed = failed or "failed" in case or case.get("error", 0.0) > 3e-2
                case = {k: round(v, 5) if isinstance(v, float) else v for k, v in case.items()}
                print(json.dumps(case), flush=True)
                lines.append(case)
        except Exception:
            # One broken operation must not cost the results of the others.
            failed = True
            traceback.print_exc()
        torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    sys.exit(failed)


if __name__ == "__main__":
    main()
