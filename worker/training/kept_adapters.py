"""Keeps the adapter as it is after some of a training's steps: what the API calls checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback

from contract.training import METRICS_FILE, TrainJob
from worker.training.adapter_folder import base_name, write_adapter
from worker.training.checkpoints import reason
from worker.training.validation import Validation


def kept_steps(steps: int, number: int) -> set[int]:
    """Return the steps after which the adapter is kept: they divide the training evenly.

    Fewer than `number` where there are not as many steps; never the last, which is the result.
    """
    places = (round(steps * part / (number + 1)) for part in range(1, number + 1))
    return {step for step in places if 0 < step < steps}


class KeptAdapters(TrainerCallback):
    """Writes the adapter after each of `kept_steps` to a folder of its own in `job.kept_dir`.

    Add it after the callbacks that know the losses. A folder is there whole or not at all; one that
    cannot be written is said, and the training goes on.
    """

    def __init__(
        self, job: TrainJob, steps: int, emit: Callable[..., None], validation: Validation
    ) -> None:
        number = job.hyperparameters.checkpoints if job.kept_dir is not None else 0
        self._steps = kept_steps(steps, number)
        self._job, self._emit, self._validation = job, emit, validation

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs, step = kwargs["logs"], state.global_step
        if step not in self._steps or not math.isfinite(logs.get("loss", math.nan)):
            return
        metrics = {"step": step, "train_loss": round(float(logs["loss"]), 4)}
        loss = self._validation.loss
        if loss is not None and self._validation.loss_step == step and math.isfinite(loss):
            metrics["full_valid_loss"] = round(loss, 4)
        assert self._job.kept_dir is not None
        try:
            self._write(self._job.kept_dir / str(step), kwargs["model"], metrics)
        except (OSError, SafetensorError) as error:
            told = f"the checkpoint after step {step} could not be kept: {reason(error)}"
            self._emit("warning", message=told)

    def _write(self, folder: Path, model: Any, metrics: dict[str, Any]) -> None:
        if folder.exists():  # by the process before, which was killed
            return

        def save(staging: Path) -> None:
            model.save_pretrained(staging)
            (staging / METRICS_FILE).write_text(json.dumps(metrics))

        write_adapter(save, base_name(self._job), folder)
