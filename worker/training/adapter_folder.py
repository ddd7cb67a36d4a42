"""Writes an adapter's folder, whole or not at all. No torch here."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.adapters.peft_config import FILE as CONFIG_FILE
from contract.training.job import TrainJob
from worker.base_model import MANIFEST


def write_adapter(
    save: Callable[[Path], Any],
    base: str,
    output_dir: Path,
    finish: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Make the adapter's folder, whole or not at all: `save` writes PEFT's two files into it.

    finish  adds what is of the two files as they stay
    Lists in the config are sorted: PEFT writes sets in an order that changes with every process,
    and the config is part of the adapter's digest.
    """
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{output_dir.name}.", dir=output_dir.parent))
    try:
        save(staging)
        config = json.loads((staging / CONFIG_FILE).read_text())
        config["base_model_name_or_path"] = base
        config["target_modules"] = sorted(config["target_modules"])
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (staging / CONFIG_FILE).write_text(text)
        (staging / "README.md").unlink(missing_ok=True)
        finish(staging)
        staging.chmod(0o755)
        staging.rename(output_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def base_name(job: TrainJob) -> str:
    """Return the base model's name: the job's, else that in lorikeet.json, else the folder's."""
    manifest = job.base_model_dir / MANIFEST
    if job.base_model or not manifest.is_file():
        return job.base_model or job.base_model_dir.name
    return str(json.loads(manifest.read_text())["name"])
