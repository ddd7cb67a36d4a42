"""Record that this process lives, for its container's health check."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from celery.signals import after_task_publish, heartbeat_sent
from django.conf import settings

from contract.alive_file import AliveFile

#: A main loop that was silent for longer is stuck; the health checks of Compose say the same.
SILENCE_S = 60.0
_noted_at: float | None = None


@functools.cache
def _file() -> AliveFile:
    return AliveFile(Path(settings.ALIVE_FILE) if settings.ALIVE_FILE else None)


def note_alive(**_: Any) -> None:
    """Record it; a process calls this in each turn of its main loop."""
    global _noted_at
    _noted_at = time.monotonic()
    _file().note()


def is_alive() -> bool:
    """Return whether the main loop runs; a process that has not recorded anything counts as."""
    return _noted_at is None or time.monotonic() - _noted_at < SILENCE_S


def watch_celery() -> None:
    """Record it whenever a Celery worker sends a heartbeat or beat sends a task."""
    heartbeat_sent.connect(note_alive)
    after_task_publish.connect(note_alive)
