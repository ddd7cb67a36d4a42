"""Says that this process lives, for who watches its container."""

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
    """Called at each turn of a process's main loop."""
    _file().note()


def watch_celery() -> None:
    """A worker lives as long as it sends heartbeats, beat as long as it sends tasks."""
    heartbeat_sent.connect(note_alive)
    after_task_publish.connect(note_alive)
