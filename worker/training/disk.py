"""The files of a batch that outlive its process: runs' checkpoints and finished adapters.

Every file appears whole or not at all, whenever the process is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from contract.adapters.draft_heads import is_head_tensor
from contract.training.job import Hyperparameters
from engine.training.checkpoint import Checkpoint

_CHECKPOINT, _RESULT = "checkpoint.safetensors", "result.json"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run's last checkpoint, and the losses of the steps before it."""

    checkpoint: Checkpoint
    losses: list[float]

    @property
    def validated(self) -> list[list[float]]:
        """[step, loss] of the validations before it."""
        told = self.checkpoint.state.get("validation") or {"losses": []}
        return [[step, round(loss, 4)] for step, loss in told["losses"]]


class CheckpointFolder:
    """A folder for the checkpoints of many runs; each run has one of its own in it.

    One process uses a run's at a time.

    root        None: each run's folder is `checkpoint`, beside the file that names the run
    is_scratch   whether nothing of it outlives this process
    """

    def __init__(self, root: Path | None, *, is_scratch: bool = False) -> None:
        self._root, self.is_scratch = root, is_scratch
        if root is not None:
            root.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, saved: SavedRun) -> None:
        """Replace the run's checkpoint."""
        folder = self._folder(name)
        folder.mkdir(exist_ok=True)
        metadata = {
            "state": json.dumps(saved.checkpoint.state),
            "losses": json.dumps(saved.losses),
        }
        staged = folder / f"{_CHECKPOINT}.part"
        save_file(saved.checkpoint.tensors, staged, metadata=metadata)
        _replace(staged, folder / _CHECKPOINT)

    def load(self, name: str) -> SavedRun | None:
        """Load the run's last checkpoint; None: there is none that can be read."""
        try:
            with safe_open(self._folder(name) / _CHECKPOINT, framework="pt") as file:
                metadata = file.metadata()
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            state, losses = json.loads(metadata["state"]), json.loads(metadata["losses"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        if self._root is None and isinstance(state, dict):
            state["run_id"] = name  # the folder is the run's own, wherever it lies now
        return SavedRun(Checkpoint(tensors, state), losses)

    def save_result(self, name: str, event: Mapping[str, Any]) -> None:
        """Keep what is to be said once the adapter's folder is there."""
        folder = self._folder(name)
        folder.mkdir(exist_ok=True)
        staged = folder / f"{_RESULT}.part"
        staged.write_text(json.dumps(event))
        _replace(staged, folder / _RESULT)

    def load_result(self, name: str) -> dict[str, Any] | None:
        """Load the event that `save_result` wrote; None: there is none."""
        try:
            event = json.loads((self._folder(name) / _RESULT).read_text())
        except (OSError, ValueError):
            return None
        return event if isinstance(event, dict) else None

    @property
    def is_kept(self) -> bool:
        """Return whether the caller who gave the jobs owns the folders, and removes them."""
        return self._root is None

    def drop(self, name: str) -> None:
        """Forget a run that has ended."""
        shutil.rmtree(self._folder(name), ignore_errors=True)

    def _folder(self, name: str) -> Path:
        if self._root is None:
            return Path(name).parent / "checkpoint"
        return self._root / hashlib.sha256(name.encode()).hexdigest()[:32]


def _replace(staged: Path, path: Path) -> None:
    """Put a file in its place, on the disk before it has the name."""
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    staged.replace(path)


def reason(error: BaseException) -> str:
    """Return an error's reason, without the names of files."""
    return str(getattr(error, "strerror", None) or error)[:200]


def save_peft(tensors: Mapping[str, torch.Tensor], hyper: Hyperparameters, folder: Path) -> None:
    """Write the adapter's config and tensors as PEFT does."""
    # Imported here: it takes seconds, which no run should wait for before its first step.
    from peft import LoraConfig, TaskType

    LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=hyper.rank,
        lora_alpha=int(hyper.alpha) if hyper.alpha == int(hyper.alpha) else hyper.alpha,
        target_modules=sorted(
            {name.split(".")[-3] for name in tensors if not is_head_tensor(name)}
        ),
        inference_mode=True,
    ).save_pretrained(folder)
    # Each in memory of its own, as the library demands.
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(own, folder / "adapter_model.safetensors", metadata={"format": "pt"})
