"""Celery's tasks of aliases; queue `ops`."""

from celery import shared_task

from controlplane.aliases import watching


@shared_task(ignore_result=True)
def canaries_watch() -> None:
    """Roll back bad canaries that the accountant has not, and take the steps of ramps."""
    watching.canaries_watch_all()
