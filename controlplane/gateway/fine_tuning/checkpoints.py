"""The models that a job has made so far: its checkpoints and its result."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

from controlplane.adapters.models import AdapterVersion
from controlplane.training.models import TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model that a job has made and that can answer requests.

    model    its name in `model` of a request
    metrics  train_loss; full_valid_loss where the state was validated
    """

    job_id: str
    version_id: uuid.UUID
    model: str
    step: int
    metrics: dict[str, Any]
    created_at: dt.datetime


def job_checkpoints(run: TrainingRun) -> list[Checkpoint]:
    """Return a job's ready models, the newest first: its result, if any, then its checkpoints."""
    found = [] if (result := _result(run)) is None else [result]
    ready = run.checkpoints.filter(version__status=AdapterVersion.Status.READY)
    for kept in ready.select_related("version").order_by("-step"):
        found.append(_of(run, kept.version, kept.step, kept.metrics))
    return found


def _result(run: TrainingRun) -> Checkpoint | None:
    if run.status != TrainingRun.Status.SUCCEEDED or run.version is None:
        return None
    progress = run.progress
    step = int(progress.get("best_step") or progress.get("step", 0))
    metrics = {"train_loss": progress.get("loss")}
    if progress.get("best_loss") is not None:
        metrics["full_valid_loss"] = progress["best_loss"]
    return _of(run, run.version, step, metrics)


def _of(run: TrainingRun, version: AdapterVersion, step: int, metrics: Any) -> Checkpoint:
    return Checkpoint(
        job_id=run.public_id,
        version_id=version.pk,
        model=f"{run.adapter.name}@{version.number}",
        step=step,
        metrics={"step": step, **metrics},
        created_at=version.ready_at or version.created_at,
    )
