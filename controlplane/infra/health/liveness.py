"""Record that this process lives: for its container's health check, and for `manage.py doctor`."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

from celery.signals import after_task_publish, beat_init, heartbeat_sent
from django.conf import settings
from django.core.cache import cache
from redis.exceptions import RedisError

from contract.process.alive_file import AliveFile

#: Silence after which a main loop counts as stuck; Compose's health checks have the same.
SILENCE_S = 60.0
#: Interval at which a process shows itself to other machines.
_SHOW_S = 10.0
_noted_at: float | None = None
_shown: dict[str, float] = {}


@functools.cache
def _file() -> AliveFile:
    return AliveFile(Path(settings.ALIVE_FILE) if settings.ALIVE_FILE else None)


def note_alive(**_: Any) -> None:
    """Record that this process lives; it calls this in each turn of its main loop."""
    global _noted_at
    _noted_at = time.monotonic()
    _file().note()


def show_alive(name: str) -> None:
    """Tell other machines, at most every 10 s, that a process lives; nothing without Redis."""
    if time.monotonic() < _shown.get(name, 0.0):
        return
    _shown[name] = time.monotonic() + _SHOW_S
    with contextlib.suppress(RedisError, OSError):
        cache.set(_name(name), time.time(), timeout=24 * 3600)


def hide(name: str) -> None:
    """Tell other machines that a process ends on purpose."""
    _shown.pop(name, None)
    with contextlib.suppress(RedisError, OSError):
        cache.delete(_name(name))


def silent_s(name: str) -> float | None:
    """Return the time since it last showed itself; None: not within a day."""
    at = cache.get(_name(name))
    return None if at is None else max(0.0, time.time() - at)


def _name(name: str) -> str:
    return f"alive:{settings.POOL}:{name}"


def is_alive() -> bool:
    """Return whether the main loop runs; a process without a record counts as running."""
    return _noted_at is None or time.monotonic() - _noted_at < SILENCE_S


def watch_celery() -> None:
    """Record a sign of life when a Celery worker sends a heartbeat or beat sends a task.

    Other processes send tasks, too, which is no turn of a loop.
    """
    heartbeat_sent.connect(note_alive)
    beat_init.connect(_watch_tasks)


def _watch_tasks(**_: Any) -> None:
    after_task_publish.connect(note_alive)
