"""Celery's tasks of this app; queue `ops`."""

from celery import shared_task
from django.utils import timezone

from controlplane.usage import retention


@shared_task(name="controlplane.usage.tasks.usage_forget")
def usage_forget() -> None:
    retention.usage_forget(now=timezone.now())
