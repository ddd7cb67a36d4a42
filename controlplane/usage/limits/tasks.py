"""Celery's entry points of this app."""

from celery import shared_task

from controlplane.usage.limits import budget_events


@shared_task(ignore_result=True)
def budgets_check() -> None:
    budget_events.budgets_check()
