"""A trainer's hold on its run: a lease, kept while the database or the store is waited for."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from django.db import connection

from controlplane.infra.outages import STORE_OUTAGE
from controlplane.tenancy.row_lease import RowLease
from controlplane.training.models import TrainingRun
from controlplane.training.runs.trainer import TrainingAbandoned

log = logging.getLogger(__name__)
_T = TypeVar("_T")

Status = TrainingRun.Status

#: A trainer silent for this long is lost. Many ticks, so that a slow database loses no run.
RUNNING_LEASE = dt.timedelta(seconds=90)
PUBLISHING_LEASE = dt.timedelta(minutes=15)
_DURATIONS = {Status.RUNNING: RUNNING_LEASE, Status.PUBLISHING: PUBLISHING_LEASE}

#: Hours of training are not thrown away because a server restarts.
MAX_WAIT_S = 3600.0
RETRY_S = 2.0
#: How often the lease is renewed while rows or a state are fetched, and a cancellation noticed.
_RENEW_S = 2.0


class RunLease(RowLease[TrainingRun]):
    """A trainer's lease on the run that it does, under the number of its attempt."""

    fence_field = "attempts"

    def renew(self, status: Status, **changes: Any) -> bool:
        """Hold on, and write `changes`; False when the run is no longer this trainer's."""
        rows = self.rows(status)
        if status == Status.RUNNING:
            rows = rows.filter(cancel_requested=False, pause_requested=False)
        return self.extend(rows, _DURATIONS[status], **changes)


def with_retry(run: TrainingRun, status: Status, work: Callable[[], _T]) -> _T:
    """Do what may be done twice, again while the database or the store is away.

    Raises TrainingAbandoned when somebody else has taken the run, or it is to be cancelled.
    """
    give_up_at = time.monotonic() + MAX_WAIT_S
    lease, is_sure = RunLease(run), True
    while True:
        try:
            if not is_sure and not lease.renew(status):
                # A commit whose answer was lost has moved it on; `work` knows.
                if status != Status.RUNNING or not lease.rows(Status.PUBLISHING).exists():
                    raise TrainingAbandoned
            return work()
        except STORE_OUTAGE as error:
            if time.monotonic() >= give_up_at:
                raise
            log.warning("a training run waits: %r", error, extra={"run_id": str(run.pk)})
            connection.close()
        is_sure = False
        time.sleep(RETRY_S)


def while_held(run: TrainingRun, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a long fetch, and renew the run's lease between them.

    Raises TrainingAbandoned when somebody else has taken the run, or it is to be cancelled.
    """
    lease, renew_at = RunLease(run), time.monotonic() + _RENEW_S
    for piece in pieces:
        if time.monotonic() >= renew_at:
            if not lease.renew(Status.RUNNING):
                raise TrainingAbandoned
            renew_at = time.monotonic() + _RENEW_S
        yield piece
