"""Celery's entry points of this app."""

from celery import shared_task
from django.utils import timezone

from controlplane.delivery import services


@shared_task
def dead_letter_prompts_forget() -> None:
    services.dead_letter_prompts_forget(now=timezone.now())
