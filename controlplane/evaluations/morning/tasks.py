"""Celery's task of the morning; queue `ops`."""

from __future__ import annotations

from celery import shared_task

from controlplane.evaluations.morning import telling


@shared_task(ignore_result=True)
def mornings_tell() -> None:
    """Publish events about the changes of schedules."""
    telling.mornings_tell()
