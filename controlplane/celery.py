"""The Celery application: queues `ingest`, `ops`, `train`, `inspect`; beat follows the settings."""

import logging.config
import os
import sys
import tempfile
from typing import Any

import structlog
from celery import Celery, Task, signals
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
#: Tasks run in children of a worker, which count in files of this folder; empty: not a worker.
#: prometheus_client reads the variable when it is imported.
METRICS_FOLDER = ""
if os.environ.get("LORIKEET_METRICS_PORT") and "worker" in sys.argv:
    METRICS_FOLDER = tempfile.mkdtemp(prefix="lorikeet-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = METRICS_FOLDER

app = Celery("controlplane")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@signals.setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    """Keep Celery from adding handlers and levels of its own: it does so unless this exists."""
    logging.config.dictConfig(settings.LOGGING)


@signals.task_prerun.connect
def _bind_task(task_id: str, task: Task, **_: Any) -> None:
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(task_id=task_id, task=task.name)


@signals.task_postrun.connect
def _unbind_task(**_: Any) -> None:
    structlog.contextvars.clear_contextvars()
