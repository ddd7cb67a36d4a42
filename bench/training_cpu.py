"""The demo's two tenants on a CPU: trained in one batch, and one after the other as before.

    python -m bench.training_cpu [--threads 2] [--steps 6]

Tokens a second of the steps alone, and CPU seconds of the whole processes: on a machine that has
other work the second says more. Each way takes `--steps` of each tenant's steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import environment
from demo.data.jobs import HYPERPARAMETERS
from worker.base_model import packaged_model

ROOT = Path(__file__).parent.parent


def write_jobs(folder: Path, base: Path, threads: int, steps: int) -> list[str]:
    """A job of each tenant."""
    paths = []
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
        paths.append(str(path))
    return paths


def train(*arguments: str) -> dict[str, float]:
    """Run a trainer: its seconds, CPU seconds, seconds of steps, and tokens."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    started = last = 0.0
    tokens = 0
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            event: dict[str, Any] = json.loads(line)
            now = time.perf_counter() - began
            started = started or now
            if event["event"] == "progress":
                last = now
            if event["event"] == "done":
                tokens += event["trained_tokens"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_s": cpu, "steps_s": last - started, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    report = environment("bench.training_cpu")
    base = packaged_model(ROOT / ".cache" / "base")
    for way in ("alone", "together"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs = write_jobs(folder, base, options.threads, options.steps)
            if way == "alone":
                parts = [train("worker.train", job) for job in jobs]
            else:
                parts = [train("worker.train_many", str(folder / "checkpoints"), *jobs)]
        sums = {key: sum(part[key] for part in parts) for key in parts[0]}
        report[way] = {key: round(value, 1) for key, value in sums.items()} | {
            "tok_s": round(sums["tokens"] / sums["steps_s"], 1),
            "tokens_per_cpu_s": round(sums["tokens"] / sums["cpu_s"], 1),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
