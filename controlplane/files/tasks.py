"""Celery's entry points of this app."""

from celery import shared_task

from controlplane.files import sweep


@shared_task
def files_sweep() -> None:
    sweep.files_sweep()
