"""Handle runs that no process works on: in a tick, and when their versions are decided."""

from __future__ import annotations

import logging
from collections.abc import Callable

from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.adapters import services as adapter_services
from controlplane.adapters.models import AdapterVersion
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training.models import TrainingRun
from controlplane.training.runs import picking, sending
from controlplane.training.runs import services as run_services
from controlplane.training.runs.endings import run_give_back
from controlplane.training.runs.events import Level, event_add
from controlplane.training.runs.lease import RunLease
from controlplane.training.runs.publishing import LOOK_AGAIN, run_conclude
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

#: Number of runs of each kind that a tick handles; the next one continues.
MAX_PER_TICK = 100
#: Interval of the event that says why a run waits.
QUOTA_CODE = "device_seconds_used_up"
Status = TrainingRun.Status


def training_runs_reconcile() -> None:
    """Handle the runs of all tenants whose lease has ended; send messages for those that may begin.

    A running one is queued again; a publishing one ends as its version did, and a lost check of the
    version is queued again. The number of queries does not grow with the number of queued runs.
    """
    with all_tenants(reason="find lost runs of all tenants"):
        lost = TrainingRun.objects.filter(
            status__in=(Status.RUNNING, Status.PUBLISHING), lease_until__lte=timezone.now()
        )
        _each(lost.select_related("version").order_by("lease_until"), _reconcile)
        # The request does the same, unless its process was lost in between.
        left = TrainingRun.objects.filter(
            Q(cancel_requested=True) | Q(pause_requested=True), status=Status.QUEUED
        )
        _each(left, lambda run: run_services.training_run_drop(run=run))
        _each(picking.first_that_wait_for_quota(), _tell_of_quota)
    sending.runs_send()


def runs_conclude(version: AdapterVersion) -> None:
    """End the runs that published a version, once it is decided; a tick ends those left over."""
    decided = (AdapterVersion.Status.READY, AdapterVersion.Status.REJECTED)
    runs = TrainingRun.objects.filter(
        status=Status.PUBLISHING, version=version, version__status__in=decided
    )
    _each(runs.select_related("version"), _reconcile)


def _each(runs: QuerySet[TrainingRun], do: Callable[[TrainingRun], None]) -> None:
    for run in list(runs[:MAX_PER_TICK]):
        with tenant_scope(run.tenant_id):
            try:
                do(run)
            except Exception:  # continue with the others
                log.exception("a lost run was not handled", extra={"run_id": str(run.pk)})


def _tell_of_quota(run: TrainingRun) -> None:
    if not run.events.filter(data__code=QUOTA_CODE).exists():
        message = (
            f"The job waits: your organization's trainings used {picking.device_seconds_used()} "
            f"device seconds in 24 hours, of {quotas.allowed('training_device_seconds')}. It "
            "begins once some of them are older"
        )
        event_add(run, message, level=Level.WARN, code=QUOTA_CODE)


def _reconcile(run: TrainingRun) -> None:
    if run.status == Status.RUNNING:
        log.warning("a trainer was lost", extra={"run_id": str(run.pk), "attempt": run.attempts})
        run_give_back(run)
    else:
        _reconcile_publishing(run)


def _reconcile_publishing(run: TrainingRun) -> None:
    version = run.version
    if version is not None and version.status in {
        AdapterVersion.Status.UPLOADED,
        AdapterVersion.Status.VALIDATING,
    }:
        RunLease(run).rows(Status.PUBLISHING).update(lease_until=timezone.now() + LOOK_AGAIN)
        adapter_services.adapter_version_complete(version=version)
    else:
        run_conclude(run, version)
