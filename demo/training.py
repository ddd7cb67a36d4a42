"""Train a tenant's adapter on its sample data with `python -m worker.train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from contract.child_environment import child_environment
from demo.data.jobs import HYPERPARAMETERS
from demo.errors import StepFailed
from demo.processes import kill_tree, log_tail
from demo.screen import Report
from demo.seed import ROOT


def train(
    tenant: str, output: Path, *, base_model_dir: Path, env: Mapping[str, str], report: Report
) -> dict[str, Any]:
    """Write the adapter folder `output` and return the trainer's last event. Raises StepFailed.

    env  the trainer gets only those of its variables that every trainer gets: no secrets
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    job = output.with_suffix(".job.json")
    job.write_text(
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
    log = output.with_suffix(".log")
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.train", str(job)],
            cwd=ROOT,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        try:
            last = _follow(process, report)
        finally:
            kill_tree(process.pid)
            status = process.wait()
    if last.get("event") != "done":
        raise StepFailed(
            f"training {tenant}'s adapter ended with status {status}",
            details="\n".join(filter(None, [last.get("message", ""), log_tail(log)])),
            advice=f"the whole log is {log}; training needs about 3 GB of free memory",
        )
    return last


def _follow(process: subprocess.Popen[str], report: Report) -> dict[str, Any]:
    """Pass the trainer's events to `report`. -> the last event."""
    assert process.stdout is not None
    last: dict[str, Any] = {}
    for event in _events(process.stdout):
        last = event
        if event["event"] == "progress":
            note = f"step {event['step']}/{event['steps']}  loss {event['loss']:.2f}"
            if event.get("eta_s") is not None:
                note += f"  {event['eta_s']:.0f} s left"
            report(event["step"] / event["steps"], note)
    process.wait()
    return last


def _events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    for line in stream:
        yield json.loads(line)
