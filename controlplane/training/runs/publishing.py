"""Makes the version of a run that is trained, and ends the run as the version ends."""

from __future__ import annotations

import datetime as dt

from django.db import transaction
from django.utils import timezone

from controlplane.adapters import services as adapter_services
from controlplane.adapters.ingest import version_drop
from controlplane.adapters.models import AdapterVersion
from controlplane.infra.hooks import Hook
from controlplane.training.models import TrainingRun
from controlplane.training.runs.attempt import Attempt
from controlplane.training.runs.endings import Fault, run_finish, run_give_back
from controlplane.training.runs.lease import PUBLISHING_LEASE, RunLease
from controlplane.training.runs.trainer import TrainingAbandoned

#: How often a tick looks at a published version that is not ready yet.
LOOK_AGAIN = dt.timedelta(seconds=15)
Status = TrainingRun.Status

#: Called with a run whose version is ready, before it succeeds: may be repeated, and raises what
#: the store raises.
before_success = Hook[[TrainingRun], None]()


@transaction.atomic
def version_of(run: TrainingRun, sizes: dict[str, int], attempt: Attempt) -> AdapterVersion:
    """Move the run to `publishing` and make its version; a repeated call returns the same one.

    Raises TrainingAbandoned.
    """
    lease = RunLease(run)
    rows = lease.rows(Status.RUNNING).filter(cancel_requested=False)
    if not lease.extend(rows, PUBLISHING_LEASE, status=Status.PUBLISHING):
        publishing = lease.rows(Status.PUBLISHING)
        made = AdapterVersion.objects.filter(training_runs__in=publishing).first()
        if made is None:
            raise TrainingAbandoned
        return made  # the connection was lost after the commit
    version = adapter_services.adapter_version_create(
        name=run.adapter.name,
        files=sizes,
        created_by=run.created_by,
        source=AdapterVersion.Source.TRAINING,
    )
    lease.rows(Status.PUBLISHING).update(version=version)
    attempt.settle()
    return version


def run_conclude(run: TrainingRun, version: AdapterVersion | None) -> None:
    """End a publishing run as its version ended; without a version, train it again."""
    if version is not None and version.status == AdapterVersion.Status.UPLOADING:
        # First, so that a lost trainer that wakes up cannot publish any more.
        if version_drop(version, "the trainer was lost before its files were there"):
            run_give_back(run, Status.PUBLISHING)
    elif version is None:
        run_give_back(run, Status.PUBLISHING)
    elif version.status in {AdapterVersion.Status.READY, AdapterVersion.Status.RETIRED}:
        before_success(run)
        run_finish(run, Status.PUBLISHING, Status.SUCCEEDED)
    elif version.status == AdapterVersion.Status.REJECTED:
        reasons = "; ".join(f"{reason['field']}: {reason['message']}" for reason in version.reasons)
        error = f"The trained adapter was rejected: {reasons}"
        run_finish(run, Status.PUBLISHING, Status.FAILED, Fault(error, "adapter_rejected"))
    else:  # it waits for its probe
        rows = RunLease(run).rows(Status.PUBLISHING)
        rows.update(lease_until=timezone.now() + LOOK_AGAIN)
