"""Celery's tasks of inspection: the work (queue `inspect`), and its sweep (queue `ops`)."""

from __future__ import annotations

from celery import shared_task

from controlplane.adapters.probing import INSPECT_TASK
from controlplane.evaluations.inspections import execution, sweep


@shared_task(name=INSPECT_TASK)
def adapter_inspect(tenant_id: str, version_id: str) -> None:
    """Inspect the next version, which may not be the one that sent this message."""
    execution.inspect_next()


@shared_task
def inspections_sweep() -> None:
    """Release versions whose wait is over; queue lost, failed and new inspections again."""
    sweep.held_release()
    sweep.open_send()
    sweep.copies_measure()
