"""Celery's tasks of this app; queue `ops`."""

from celery import shared_task

from controlplane.deletion import execution


@shared_task
def tenants_delete() -> None:
    """Delete the tenants whose grace period is over."""
    execution.tenants_delete()
