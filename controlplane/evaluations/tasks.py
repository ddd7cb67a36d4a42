"""Celery's tasks of evaluations: turns of work, the gate's decisions, and their sweep."""

from __future__ import annotations

from celery import shared_task

from controlplane.evaluations import execution, gate, services
from controlplane.evaluations.models import Evaluation
from controlplane.tenancy.scoping import all_tenants, tenant_scope

#: Largest number of messages that one turn sends again.
_MAX_SENT = 20


@shared_task(name=services.RUN_TASK)
def evaluation_run() -> None:
    """Do a turn of the next evaluation (queue `inspect`)."""
    if execution.evaluate_next():
        gate.gates_send()


@shared_task(name=services.JUDGE_TASK)
def evaluation_judge() -> None:
    """Ask judges for a turn (queue `ops`, whose processes have the keys of judges)."""
    if execution.judge_next():
        gate.gates_decide()


@shared_task(name=gate.GATE_TASK)
def gates_decide() -> None:
    """Begin and decide gates (queue `ops`)."""
    gate.gates_decide()


@shared_task
def evaluations_sweep() -> None:
    """Queue lost evaluations again, and look at waiting gates."""
    statuses = (Evaluation.Status.RUNNING, Evaluation.Status.JUDGING, Evaluation.Status.QUEUED)
    with all_tenants(reason="find lost evaluations of all tenants"):
        due = list(execution.lost(statuses)[:_MAX_SENT])
    for evaluation in due:
        with tenant_scope(evaluation.tenant_id):
            services.evaluation_send(evaluation)
    gate.gates_decide()
