"""Keeps a run's adapter as it is after some of its steps: what the API calls checkpoints."""

from __future__ import annotations

import functools
import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from contract.training.job import METRICS_FILE
from engine.model.config import ModelConfig
from engine.training.checkpoint import MASTER, Checkpoint
from engine.training.parameters import AdapterLayout
from worker.training.adapter_folder import base_name, write_adapter
from worker.training.disk import reason, save_peft
from worker.training.jobs import PreparedJob


class KeptAdapters:
    """Writes each, in the writer's thread, to a folder of its own in `job.kept_dir`: its step.

    A folder is there whole or not at all. If one cannot be written, `tell` warns of it, and the
    training continues.
    """

    def __init__(self, writer: ThreadPoolExecutor, emit: Callable[..., None]) -> None:
        self._writer, self._emit = writer, emit
        self._writing: deque[tuple[str, int, Future[None]]] = deque()

    def write(self, prepared: PreparedJob, told: dict[str, Any], saved: Checkpoint) -> None:
        """Begin to write the adapter of a state, unless the process before this one did.

        told  the progress of the state's step
        """
        job, step = prepared.named.job, told["step"]
        assert job.kept_dir is not None
        folder = job.kept_dir / str(step)
        if folder.exists():
            return
        metrics = {"step": step, "train_loss": told["loss"]}
        if "validation_loss" in told:
            metrics["full_valid_loss"] = told["validation_loss"]
        config = ModelConfig.from_folder(job.base_model_dir)
        tensors = AdapterLayout(config, prepared.request.settings).tensors(saved.tensors[MASTER])
        save = functools.partial(save_peft, tensors, job.hyperparameters)
        add = functools.partial(_write_metrics, metrics)
        written = self._writer.submit(write_adapter, save, base_name(job), folder, add)
        self._writing.append((prepared.named.name, step, written))

    def tell(self, *, wait: bool = False) -> None:
        """Warn of adapters that could not be written; with `wait`, once all have been tried."""
        while self._writing and (wait or self._writing[0][2].done()):
            name, step, written = self._writing.popleft()
            error = written.exception()
            if isinstance(error, OSError | SafetensorError):
                problem = f"the checkpoint after step {step} could not be kept: {reason(error)}"
                self._emit(name, "warning", message=problem)
            elif error is not None:
                raise error


def _write_metrics(metrics: dict[str, Any], folder: Path) -> None:
    (folder / METRICS_FILE).write_text(json.dumps(metrics))
