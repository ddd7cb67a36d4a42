"""Measure the seconds until an engine is ready on a GPU, with an empty and a filled kernel cache.

    python -m bench.start [--shape llama-3.1-8b] [--out FILE]

Each start is a process of its own that imports torch, makes random weights of the shape and then
builds the engine. Only building counts, which compiles what Triton's cache lacks and records every
graph. The settings are a worker's: 64 running requests, 512 tokens per step. Reading real weights
from a disk takes additional time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.device import provenance
from bench.machine import write_result
from bench.workload import SHAPES, random_weights
from engine import Engine, EngineConfig
from engine.model.config import ModelConfig


def start_s(shape: str, device: str) -> float:
    """Return the seconds that building one engine takes in this process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        model = ModelConfig.from_fields(SHAPES[shape], None)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        weights = random_weights(model, device, dtype)
        started = time.perf_counter()
        engine = Engine(EngineConfig(model_dir=Path(folder), device=device), weights=weights)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        engine.close()
        return seconds


def in_a_process(shape: str, device: str, cache: Path) -> float:
    """Do `start_s` in a new process whose Triton cache is `cache`."""
    command = [sys.executable, "-m", "bench.start", "--shape", shape, "--device", device, "--once"]
    ran = subprocess.run(
        command,
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(ran.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--once", action="store_true", help="one start, here; prints its seconds")
    parser.add_argument("--out", type=Path, help="write host and results as JSON")
    args = parser.parse_args()
    if args.once:
        print(start_s(args.shape, args.device))
        return
    host = provenance(args.device)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("empty", "own", "own"):
            seconds = in_a_process(args.shape, args.device, Path(cache))
            results.append({"kernel_cache": kind, "start_s": round(seconds, 1)})
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        command = "python -m bench.start " + " ".join(sys.argv[1:])
        write_result(args.out, {"host": host, "command": command, "results": results})


if __name__ == "__main__":
    main()
