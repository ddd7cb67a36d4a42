"""Train queued runs of one base model together, in one child; a run alone is a batch of one.

Each run keeps what it has alone: its claim, its lease, its attempts, its time limit, its end. A
thread of its own does all of it; only the child is shared.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid

from django.conf import settings
from django.db import connection
from structlog.contextvars import bound_contextvars

from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.models import TrainingRun
from controlplane.training.runs import picking, sending
from controlplane.training.runs.batch_child import BatchChild
from controlplane.training.runs.kept.kept_folders import folders_sweep, kept_folder
from controlplane.training.runs.running import RunningRun

log = logging.getLogger(__name__)

#: Seconds between two looks for a run that may join a batch.
JOIN_S = 2.0


def training_next() -> None:
    """Train and publish the run that is next, and beside it others of its base model.

    How many at most is the setting `LORIKEET_TRAIN_BATCH`; with 1 each has a child of its own.
    """
    first = picking.run_claim_next()
    if first is None:
        return
    runs = [first]
    if first.num_lost < picking.LOST_TOGETHER:
        while len(runs) < settings.TRAIN_BATCH:
            another = picking.run_claim_next(beside=first)
            if another is None:
                break
            runs.append(another)
    folders_sweep()
    Batch(runs).run()
    folders_sweep()
    send_waiting()


def send_waiting() -> None:
    """Send the run that is next, if one waits."""
    # The message for the tenant's next run may have been delivered, and dropped, during this run.
    waiting = picking.next_run()
    if waiting is not None:
        sending.run_send(waiting)


def training_run_execute(run_id: uuid.UUID) -> bool:
    """Train and publish a queued run of the tenant in scope. -> False if it may not begin now."""
    run = picking.run_claim(run_id)
    if run is None:
        return False
    Batch([run]).run()
    return True


class Batch:
    """Claimed runs of one base model, and the child that trains them.

    Others that are queued later join them, if `LORIKEET_TRAIN_BATCH` has room for more and the
    first is not to be trained by itself.
    """

    def __init__(self, runs: list[TrainingRun]) -> None:
        self._runs = runs
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Train and publish the runs; returns when all have ended."""
        first, most = self._runs[0], max(settings.TRAIN_BATCH, len(self._runs))
        joins = most > 1 and first.num_lost < picking.LOST_TOGETHER
        with scratch_folder("batch-") as folder:
            self._child = BatchChild(
                folder,
                len(self._runs),
                settings.TRAINER_ENVIRONMENT,
                settings.TRAINING_SOCKET,
                most if joins else None,
            )
            for run in self._runs:
                self._start(run)
            joining = threading.Thread(target=self._let_join, name="joining")
            joining.start()
            try:
                self._child.run()
            finally:
                joining.join()
                for thread in self._threads:
                    thread.join()

    def _start(self, run: TrainingRun) -> None:
        """Do one run from its rows to its version, in a thread."""
        thread = threading.Thread(target=self._train, args=(run,), name=f"run-{run.pk}")
        self._threads.append(thread)
        thread.start()

    def _train(self, run: TrainingRun) -> None:
        try:
            with (
                contextlib.closing(self._child.place()) as place,
                tenant_scope(run.tenant_id),
                bound_contextvars(run_id=str(run.pk)),
                kept_folder(run.pk, run.attempts) as kept,
                contextlib.closing(RunningRun(run, kept, place)) as running,
            ):
                running.execute()
        finally:
            connection.close()

    def _let_join(self) -> None:
        """Start each run that may join, as long as any may; in a thread of its own.

        After the time that a run may take none joins any more, so that the child, too, ends.
        """
        until = time.monotonic() + settings.TRAINING_MAX_RUN_S
        try:
            while self._child.expect_another(JOIN_S):
                run = None
                try:
                    if time.monotonic() >= until:
                        self._child.close()
                    else:
                        run = picking.run_claim_next(beside=self._runs[0], in_turn=True)
                except DATABASE_OUTAGE as error:
                    log.warning("no run joins the batch without the database: %r", error)
                    connection.close()
                finally:
                    if run is None:
                        self._child.leave()
                if run is not None:
                    self._start(run)
        finally:
            self._child.close()
            connection.close()
