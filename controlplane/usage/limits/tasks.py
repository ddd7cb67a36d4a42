"""Celery's entry points of this app."""

from celery import shared_task

from controlplane.usage.limits import budget_events


@shared_task(name="controlplane.usage.limits.tasks.budgets_check", ignore_result=True)
def budgets_check() -> None:
    budget_events.budgets_check()
