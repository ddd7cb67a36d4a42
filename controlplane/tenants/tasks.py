"""Celery's entry points of this app."""

from celery import shared_task

from controlplane.tenants import idempotency


@shared_task
def idempotency_records_expire() -> None:
    idempotency.expire()
