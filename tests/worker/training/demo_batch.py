"""Train the demo's adapters together, as its platform does, without a platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from contract.process.child_environment import child_environment
from demo.data.jobs import HYPERPARAMETERS
from demo.errors import StepFailed
from demo.processes import kill_tree, log_tail
from demo.screen import Report
from demo.seed import ROOT


def train(
    outputs: Mapping[str, Path],
    *,
    base_model_dir: Path,
    env: Mapping[str, str],
    report: Report,
) -> dict[str, dict[str, Any]]:
    """Write each tenant's adapter folder, and return its last event. Raises StepFailed.

    All train in one batch; what a stopped demo has trained, the next one goes on from.

    outputs  folder by tenant, side by side
    env      the trainer gets only those of its variables that every trainer gets: no secrets
    """
    (folder,) = {output.parent for output in outputs.values()}
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {}
    for tenant, output in outputs.items():
        jobs[tenant] = output.with_suffix(".job.json")
        jobs[tenant].write_text(
            json.dumps(
                {
                    "base_model_dir": str(base_model_dir),
                    "dataset": str(ROOT / "demo" / "data" / f"{tenant}.jsonl"),
                    "output_dir": str(output),
                    "hyperparameters": HYPERPARAMETERS[tenant],
                    "num_threads": os.cpu_count() or 1,
                }
            )
        )
    log = folder / "training.log"
    command = ["worker.train", f"--checkpoints={folder / 'checkpoints'}", *map(str, jobs.values())]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        try:
            last = _follow(process, {str(path): tenant for tenant, path in jobs.items()}, report)
        finally:
            kill_tree(process.pid)
            status = process.wait()
    for tenant in outputs:
        event = last.get(tenant, {})
        if event.get("event") != "done":
            raise StepFailed(
                f"training {tenant}'s adapter ended with status {status}",
                details="\n".join(filter(None, [event.get("message", ""), log_tail(log)])),
                advice=f"the whole log is {log}; training needs about 3 GB of free memory",
            )
    return last


def _follow(
    process: subprocess.Popen[str], tenants: Mapping[str, str], report: Report
) -> dict[str, dict[str, Any]]:
    """Pass the trainer's events to `report`. -> the last event of each tenant."""
    assert process.stdout is not None
    last: dict[str, dict[str, Any]] = {}
    shares = dict.fromkeys(tenants.values(), 0.0)
    for event in _events(process.stdout):
        tenant = tenants[event["run"]]
        last[tenant] = event
        if event["event"] == "progress":
            shares[tenant] = event["step"] / event["steps"]
            note = f"{tenant} step {event['step']}/{event['steps']}  loss {event['loss']:.2f}"
            report(sum(shares.values()) / len(shares), note)
    process.wait()
    return last


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        yield json.loads(line)
