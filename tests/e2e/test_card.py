"""The platform on a GPU: what a worker and a trainer on one card leave to each other.

`LORIKEET_TEST_DEVICE=cuda python -m pytest tests/e2e -m ""` runs the folder's tests there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.seed import ROOT
from tests.e2e.system import System

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("LORIKEET_TEST_DEVICE") != "cuda", reason="needs a card"),
]


def train(system: System, folder: Path, share: float) -> list[dict[str, Any]]:
    """The events of a small run that may use a share of the card."""
    job = {
        "base_model_dir": system.env["LORIKEET_BASE_MODEL"],
        "dataset": str(ROOT / "demo" / "data" / "acme.jsonl"),
        "output_dir": str(folder / "adapter"),
        "hyperparameters": {"rank": 4, "max_steps": 2, "batch_size": 2},
        "gpu_share": share,
    }
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "worker.train", str(folder / "job.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert events, done.stderr
    return events


def test_the_worker_leaves_the_trainers_share_free(system: System) -> None:
    import torch

    share = float(system.env["LORIKEET_TRAINER_GPU_SHARE"])
    free, total = torch.cuda.mem_get_info()
    assert share * total <= free < (share + 0.1) * total, (free, total)


def test_a_run_beside_the_worker(system: System, tmp_path: Path) -> None:
    share = float(system.env["LORIKEET_TRAINER_GPU_SHARE"])
    assert train(system, tmp_path, share)[-1]["event"] == "done"


def test_a_share_that_is_too_small_is_named(system: System, tmp_path: Path) -> None:
    end = train(system, tmp_path, 0.001)[-1]
    assert end["event"] == "error"
    assert "may use 0.001" in end["message"]
