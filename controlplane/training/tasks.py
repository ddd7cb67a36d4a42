"""The Celery side of training: the tick (queue `ops`) and the runs (queue `train`)."""

from __future__ import annotations

import uuid

from celery import shared_task

from controlplane.scoping import tenant_scope
from controlplane.training import execution, schedules


@shared_task
def schedules_fire() -> None:
    """Start the runs that are due, and look after those that were lost."""
    schedules.schedules_fire()
    execution.training_runs_reconcile()


@shared_task
def training_run_execute(tenant_id: str, run_id: str) -> None:
    """Train one run. Delivered twice, it trains once."""
    with tenant_scope(uuid.UUID(tenant_id)):
        execution.training_run_execute(uuid.UUID(run_id))
