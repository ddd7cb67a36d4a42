"""Training many runs in one batch at Llama-3.1-8B's shape, random weights made on the card.

    python -m bench.training [--case NAME] [--quick] [--profile] [--out FILE]
    python -m bench.training --case beside [--beside-share 0.8]    serving and training together
    python -m bench.training --case night [--night-share 0.25]     100 runs of 64k tokens
    python -m bench.training --micro [--share I/N] [--compile]     each operation, see training_ops

Tokens a second are of whole steps: forward, backward and the update of every run. TFLOP/s count the
base's products once, recomputed ones not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is imported: near the card's memory, pieces of fixed sizes are freed and taken anew.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from bench.device import provenance, write_whole
from bench.machine import commit
from bench.training_beside import run_beside, run_night
from bench.training_ops import bench_operations
from bench.training_stack import TINY, Shape, Stack, Work
from bench.training_trainer import time_trainer
from engine.beside.room import BesideConfig

RESULTS = Path(__file__).parent / "results" / "training-h200.json"
#: Name -> the work of a step and the share of layers that are recomputed.
CASES: dict[str, tuple[Work, float]] = {
    "64x256": (Work(64, 1, 256), 0.0),
    "64x256 recompute": (Work(64, 1, 256), 1.0),
    "1x16384": (Work(1, 64, 256), 0.0),
    "1x16384 recompute": (Work(1, 64, 256), 1.0),
    "PEFT 16x1024 recompute": (Work(1, 16, 1024), 1.0),
    "PEFT 16x512": (Work(1, 16, 512), 0.0),
    "PEFT 8x256 recompute": (Work(1, 8, 256), 1.0),
    "PEFT 8x256": (Work(1, 8, 256), 0.0),
}
#: The same through `engine.training.BatchTrainer`: as the first case, whose runs share every
#: micro-batch, and with the platform's own batch of 8 rows, so that runs take turns.
TRAINER_CASES = {
    "BatchTrainer 64x256": Work(64, 1, 256),
    "BatchTrainer 64 runs of 8x256": Work(64, 8, 256),
}


#: Of several minutes each, which are measured only when they are asked for.
LONG_CASES = ("beside", "night")


def time_steps(stack: Stack, steps: int) -> list[float]:
    """Seconds of each step after two that warm up."""
    for _ in range(2):
        stack.step()
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = stack.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert torch.isfinite(loss), loss
    return times


def run_case(name: str, steps: int, shape: Shape, profile: bool) -> dict[str, Any]:
    """Measure one case; with `profile` also what the time of a step goes to."""
    work, share = CASES[name]
    torch.cuda.reset_peak_memory_stats()
    stack = Stack(shape, work, recomputed=round(share * shape.layers))
    seconds = statistics.median(time_steps(stack, steps))
    case: dict[str, Any] = {
        "case": name,
        "runs": work.runs,
        "tokens": work.tokens,
        "tok_s": round(work.tokens / seconds),
        "tflop_s": round(stack.step_tflop() / seconds, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "step_ms": round(seconds * 1e3, 1),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
    if profile:
        case |= profile_step(stack)
    return case


def run_trainer_case(
    name: str, steps: int, shape: Shape, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the batch trainer itself; on a CPU only with --tiny."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    work = TRAINER_CASES[name]
    if options.tiny:
        work = replace(work, runs=4)
    return time_trainer(name, shape, work, steps, options.device, options.profile)


def run_long_case(name: str, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Measure serving beside training, or a night's runs."""
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if name == "beside":
        config = BesideConfig(share=options.beside_share)
        return run_beside(name, shape, options.device, config)
    runs = 4 if options.tiny else 100
    return run_night(name, shape, options.device, options.night_share, runs=runs)


#: Part of a step -> what its kernels' names begin with, or have in them.
PARTS = {
    "base products": ("nvjet", "cutlass", "gemm"),
    "adapters": (
        "_in_kernel", "_out_kernel", "_back_kernel", "_both_", "_sum_", "_a_kernel", "_merge",
    ),
    "activation with adapters": ("_lora_silu", "_silu"),
    "attention": ("_attention", "flash", "_rotate"),
    "norms": ("_norm_kernel", "_norm_back"),
    "loss": ("_loss",),
    "update": ("_update", "_square"),
}  # fmt: skip


def parts_of(kernels: dict[str, float]) -> dict[str, float]:
    """Milliseconds of a step by part."""
    parts = dict.fromkeys([*PARTS, "other"], 0.0)
    for kernel, milliseconds in kernels.items():
        names = [part for part, words in PARTS.items() if any(w in kernel for w in words)]
        # The most telling first: `_lora_silu_back_kernel` has `_back_kernel` in it.
        special = [name for name in names if name != "adapters"]
        parts[(special or names or ["other"])[0]] += milliseconds
    return {part: round(milliseconds, 1) for part, milliseconds in parts.items()}


def profile_step(stack: Stack, most: int = 24) -> dict[str, Any]:
    """Milliseconds of a step by part, and with launches those of its longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        stack.step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        name = event.key[:90]
        milliseconds, count = found.get(name, [0.0, 0])
        found[name] = [milliseconds + event.self_device_time_total / 1e3, count + event.count]
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    return {
        "parts_ms": parts_of({name: ms for name, (ms, _) in found.items()}),
        "kernels_ms": {name: [round(ms, 2), count] for name, (ms, count) in longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=[*CASES, *TRAINER_CASES, *LONG_CASES])
    parser.add_argument("--quick", action="store_true", help="three steps, nothing measured before")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--beside-share", type=float, default=BesideConfig().share)
    parser.add_argument("--night-share", type=float, default=1.0)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--micro", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a decoder for trying this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.micro:
        share = [int(each) for each in options.share.split("/")]
        for line in bench_operations(options.only, (share[0], share[1]), options.compile):
            print(json.dumps(line), flush=True)
        return
    shape = TINY if options.tiny else Shape(layers=options.layers or Shape.layers)
    report: dict[str, Any] = {"commit": commit()} if options.quick else provenance()
    report["card"] = torch.cuda.get_device_name() if options.device == "cuda" else None
    report["limit"] = "23,200 tok/s without recompute at 695 TFLOP/s"
    report["cases"] = []
    steps = 3 if options.quick else 8
    for name in options.case or [*CASES, *TRAINER_CASES]:
        try:
            if name in LONG_CASES:
                case = run_long_case(name, shape, options)
            elif name in TRAINER_CASES:
                case = run_trainer_case(name, 2 * steps, shape, options)
            else:
                case = run_case(name, steps, shape, options.profile)
        except torch.OutOfMemoryError as error:
            case = {"case": name, "failed": str(error)[:200]}
        report["cases"].append(case)
        print(json.dumps(case), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        write_whole(options.out, report)
    if any("failed" in case for case in report["cases"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
