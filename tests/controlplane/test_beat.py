"""Celery's workers know the tasks that beat starts and that the settings route."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from controlplane.celery import app


def registered() -> set[str]:
    app.loader.import_default_modules()
    return set(app.tasks)


def test_every_task_that_beat_starts_is_known(settings: Any) -> None:
    """A worker discards a task that it does not know, and logs an error."""
    started = {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()}
    assert started - registered() == set()


def test_every_route_is_of_a_known_task(settings: Any) -> None:
    names = registered()
    routes = settings.CELERY_TASK_ROUTES
    assert [each for each in routes if not any(fnmatchcase(name, each) for name in names)] == []


def test_a_task_whose_worker_died_is_done_by_another(settings: Any) -> None:
    assert settings.CELERY_TASK_ACKS_LATE and settings.CELERY_TASK_REJECT_ON_WORKER_LOST
