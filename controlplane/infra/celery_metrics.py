"""Count Celery's tasks, and serve the metrics of its workers and of beat."""

from __future__ import annotations

import shutil
import time
from typing import Any

from celery import signals

from controlplane.celery import METRICS_FOLDER
from controlplane.infra import metrics

#: Start of the task that this process runs; a child runs one at a time.
_begun: dict[str, float] = {}


def watch() -> None:
    """Begin to count, and serve when a Celery worker or beat has started."""
    signals.worker_ready.connect(_serve_worker)
    signals.beat_init.connect(_serve_beat)
    signals.worker_shutdown.connect(_remove_files)
    signals.task_prerun.connect(_begin)
    signals.task_postrun.connect(_end)
    signals.after_task_publish.connect(_sent)


def _serve_worker(**_: Any) -> None:
    metrics.serve("database", "broker", "object store", is_shared=True)


def _serve_beat(**_: Any) -> None:
    metrics.serve("broker")


def _remove_files(**_: Any) -> None:
    if METRICS_FOLDER:
        shutil.rmtree(METRICS_FOLDER, ignore_errors=True)


def _begin(task_id: str, **_: Any) -> None:
    _begun.clear()
    _begun[task_id] = time.monotonic()


def _end(task_id: str, task: Any, state: str | None = None, **_: Any) -> None:
    metrics.TASKS.labels(task.name, (state or "unknown").lower()).inc()
    if (began_at := _begun.pop(task_id, None)) is not None:
        metrics.TASK_SECONDS.labels(task.name).observe(time.monotonic() - began_at)


def _sent(sender: str, **_: Any) -> None:
    metrics.TASKS_SENT.labels(sender).inc()
