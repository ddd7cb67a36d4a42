"""The servers that a process needs, and those that do not answer: /readyz."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import redis
from django.conf import settings

from controlplane.infra import storage
from controlplane.infra.health.preflight import connect_once

#: Time for which results are kept, because strangers may ask for /readyz often.
KEPT_S = 2.0
_ANSWER_S = 2


def _ping(url: str) -> None:
    with redis.Redis.from_url(
        url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S, retry=None
    ) as client:
        client.ping()


#: Name -> a function that raises when the server does not answer.
CHECKS: Mapping[str, Callable[[], None]] = {
    "database": lambda: connect_once(settings.DATABASES["default"], _ANSWER_S),
    "redis": lambda: _ping(settings.REDIS_URL),
    "broker": lambda: _ping(settings.CELERY_BROKER_URL),
    "object store": lambda: storage.check_answers(_ANSWER_S),
}

_lock = threading.Lock()
_kept: dict[str, tuple[float, bool]] = {}  # until when, whether it answers


def missing(*names: str) -> list[str]:
    """Return those of the named servers that do not answer, as of the last two seconds."""
    with _lock:
        now = time.monotonic()
        due = [name for name in names if _kept.get(name, (0.0, True))[0] <= now]
        if due:
            with ThreadPoolExecutor(len(due)) as threads:
                for name, answers in zip(due, threads.map(_answers, due), strict=True):
                    _kept[name] = time.monotonic() + KEPT_S, answers
        return [name for name in names if not _kept[name][1]]


def _answers(name: str) -> bool:
    try:
        CHECKS[name]()
    except Exception:  # whatever the client raises: the process cannot use the server
        return False
    return True
