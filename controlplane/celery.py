"""The Celery application: queues `ingest`, `ops` and `train`; beat fires what settings lists."""

import logging.config
import os
from typing import Any

import structlog
from celery import Celery, Task, signals
from django.conf import settings

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

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
