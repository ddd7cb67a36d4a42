"""Celery's tasks of this app; queue `ops`."""

from celery import shared_task
from django.utils import timezone

from controlplane.usage import retention


@shared_task
def usage_forget() -> None:
    retention.usage_forget(now=timezone.now())
