"""The demo's two tenants on a CPU: trained in one batch, and one after the other as before.

    python -m bench.training_cpu [--threads 2] [--steps 6] [--pairs 3]

Tokens a second of the steps alone, and CPU seconds of the whole processes: on a machine that has
other work the second says more. Each way takes `--steps` of each tenant's steps. Both ways are
measured `--pairs` times, one after the other; the ratios (together / alone) are the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.machine import environment
from demo.data.jobs import HYPERPARAMETERS
from worker.base_model import packaged_model

ROOT = Path(__file__).parent.parent
WAYS = ("alone", "together")


def write_jobs(folder: Path, base: Path, threads: int, steps: int) -> dict[str, str]:
    """Write a job for each tenant. -> the files by tenant."""
    paths = {}
    for tenant, hyperparameters in HYPERPARAMETERS.items():
        path = folder / f"{tenant}.json"
        fields = {
            "base_model_dir": str(base),
            "dataset": str(ROOT / "demo" / "data" / f"{tenant}.jsonl"),
            "output_dir": str(folder / tenant),
            "hyperparameters": hyperparameters | {"max_steps": steps},
            "num_threads": threads,
        }
        path.write_text(json.dumps(fields))
        paths[tenant] = str(path)
    return paths


def events(*arguments: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """Run `python -m ARGUMENTS`; yield each event that it prints, after its seconds since then.

    Raises CalledProcessError unless it exits with 0.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith('{"event"'):  # transformers' Trainer prints lines of its own
                yield time.perf_counter() - began, json.loads(line)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def train(*arguments: str) -> dict[str, float]:
    """Run a trainer: its seconds, CPU seconds, seconds of steps, and tokens."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    started = last = 0.0
    tokens = 0
    for now, event in events(*arguments):
        started = started or now
        if event["event"] == "progress":
            last = now
        if event["event"] == "done":
            tokens += event["trained_tokens"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_s": cpu, "steps_s": last - started, "tokens": tokens}


def measure(way: str, base: Path, threads: int, steps: int) -> dict[str, float]:
    """Train both tenants `way`: "alone", a process each, or "together"."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = write_jobs(folder, base, threads, steps).values()
        if way == "alone":
            parts = [train("worker.train", job) for job in jobs]
        else:
            parts = [train("worker.train", f"--checkpoints={folder / 'checkpoints'}", *jobs)]
    sums = {key: sum(part[key] for part in parts) for key in parts[0]}
    return {key: round(value, 1) for key, value in sums.items()} | {
        "tok_s": round(sums["tokens"] / sums["steps_s"], 1),
        "tokens_per_cpu_s": round(sums["tokens"] / sums["cpu_s"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    report = environment("bench.training_cpu")
    base = packaged_model(ROOT / ".cache" / "base")
    pairs = []
    for number in range(options.pairs):
        ways = WAYS if number % 2 == 0 else WAYS[::-1]  # so that no way always goes first
        load = round(os.getloadavg()[0], 2)
        pair = {way: measure(way, base, options.threads, options.steps) for way in ways}
        pairs.append({"load_average": load, **pair})
    report["pairs"] = pairs
    for key in ("tok_s", "tokens_per_cpu_s"):
        ratios = [pair["together"][key] / pair["alone"][key] for pair in pairs]
        report[f"{key}_ratio"] = round(statistics.median(ratios), 2)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
