"""Celery's entry points of this app."""

from celery import shared_task

from controlplane.limits import budget_events


@shared_task(name="controlplane.limits.tasks.budgets_check", ignore_result=True)
def budgets_check() -> None:
    budget_events.budgets_check()
