"""Measures the best that a GPU can do, and times what runs on it, for the other benchmarks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton

from bench.machine import commit


def graph_ms(run: Callable[[], object], repeats: int = 20, rounds: int = 5) -> float:
    """Return the median milliseconds of one `run`, replayed back to back from a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def copy_tb_s() -> float:
    """Return the TB/s of an 8 GB device-to-device copy, bytes read plus bytes written.

    It uses no graph, in which a copy becomes another kind of node, which is slower.
    """
    source = torch.randn(1 << 32, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 4 * source.numel() / statistics.median(times) / 1e9


def matmul_tflop_s(size: int = 8192) -> float:
    """Return the TFLOP/s of a square bf16 product of random data."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * size**3 / graph_ms(lambda: torch.mm(a, b, out=out), repeats=10) / 1e9


def provenance(device: str = "cuda") -> dict[str, Any]:
    """Return what a result must state: GPU, its measured limits, versions, commit."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": commit()}
    if device == "cpu":
        return {"gpu": None, **versions}
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; on a CPU: --device cpu --shape tiny, where they exist")
    return {
        "gpu": torch.cuda.get_device_name(),
        "copy_tb_s": round(copy_tb_s(), 3),
        "matmul_tflop_s": round(matmul_tflop_s(), 1),
        **versions,
    }
