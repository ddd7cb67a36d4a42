"""Celery's entry points of this app. A task's name is what waits in Redis: it stays."""

from celery import shared_task
from django.utils import timezone

from controlplane.queue import dead_letters
from controlplane.queue.placement import prefix_warmth, warmth


@shared_task
def dead_letter_prompts_forget() -> None:
    dead_letters.dead_letter_prompts_forget(now=timezone.now())


@shared_task
def warmth_keep() -> None:
    warmth.warmth_keep()
    prefix_warmth.prefixes_keep()
