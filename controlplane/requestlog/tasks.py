"""Celery's entry points of this app."""

from celery import shared_task
from django.utils import timezone

from controlplane.requestlog import retention


@shared_task
def requests_forget() -> None:
    retention.requests_forget(now=timezone.now())
