"""Record that this process lives, for its container's health check."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from celery.signals import after_task_publish, heartbeat_sent
from django.conf import settings

from contract.alive_file import AliveFile


@functools.cache
def _file() -> AliveFile:
    return AliveFile(Path(settings.ALIVE_FILE) if settings.ALIVE_FILE else None)


def note_alive(**_: Any) -> None:
    """Record it; a process calls this in each turn of its main loop."""
    _file().note()


def watch_celery() -> None:
    """Record it whenever a Celery worker sends a heartbeat or beat sends a task."""
    heartbeat_sent.connect(note_alive)
    after_task_publish.connect(note_alive)
