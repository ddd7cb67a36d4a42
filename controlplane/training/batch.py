"""Train several queued runs of one base model together, in one child process.

Each run keeps its own claim, lease, attempts, time limit and end, all handled by a thread of its
own; only the child is shared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection

from contract.training import TrainJob
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import execution, judging, picking
from controlplane.training.batch_child import BatchChild
from controlplane.training.kept_folders import folders_sweep
from controlplane.training.models import TrainingRun

log = logging.getLogger(__name__)

#: Interval at which a batch looks for a run that may join it.
JOIN_S = 2.0


def training_next() -> None:
    """Train and publish the next run, and together with it others of its base model.

    How many at most is the setting `LORIKEET_TRAIN_BATCH`; with 1 each has a child of its own.
    """
    if settings.TRAIN_BATCH == 1:
        execution.training_run_next()
        return
    first = execution.run_claim_next()
    if first is None:
        return
    runs = [first]
    if first.num_lost < picking.LOST_TOGETHER:
        while len(runs) < settings.TRAIN_BATCH:
            another = execution.run_claim_next(beside=first)
            if another is None:
                break
            runs.append(another)
    runs_train_together(runs)
    execution.send_waiting()


def runs_train_together(runs: list[TrainingRun]) -> None:
    """Train and publish claimed runs of one base model; return when all have ended.

    Runs queued later join them, unless the first must be trained alone.
    """
    folders_sweep()
    joins = runs[0].num_lost < picking.LOST_TOGETHER
    most = max(settings.TRAIN_BATCH, len(runs)) if joins else None
    threads: list[threading.Thread] = []
    with scratch_folder("batch-") as folder:
        child = BatchChild(
            folder, len(runs), settings.TRAINER_ENVIRONMENT, settings.TRAINING_SOCKET, most
        )

        def start(run: TrainingRun) -> None:
            name = f"run-{run.pk}"
            threads.append(threading.Thread(target=_train_one, args=(run, child), name=name))
            threads[-1].start()

        for run in runs:
            start(run)
        door = threading.Thread(target=_let_join, args=(runs[0], child, start), name="joining")
        door.start()
        try:
            child.run()
        finally:
            door.join()
            for thread in threads:
                thread.join()
    folders_sweep()


def _let_join(first: TrainingRun, child: BatchChild, start: Callable[[TrainingRun], None]) -> None:
    """Start a thread for each run that may join, until none may.

    After the time limit of a run none joins any more, so that the child ends, too.
    """
    until = time.monotonic() + settings.TRAINING_MAX_RUN_S
    try:
        while child.expect_another(JOIN_S):
            run = None
            try:
                if time.monotonic() >= until:
                    child.close()
                else:
                    run = execution.run_claim_next(beside=first, in_turn=True)
            except DATABASE_OUTAGE as error:
                log.warning("no run joins the batch without the database: %r", error)
                connection.close()
            finally:
                if run is None:
                    child.leave()
            if run is not None:
                start(run)
    finally:
        child.close()
        connection.close()


def _train_one(run: TrainingRun, child: BatchChild) -> None:
    """Do one run from its rows to its version, in its tenant's scope."""
    has_come = False

    def train(job: TrainJob, *args: Any, **kwargs: Any) -> None:
        nonlocal has_come
        has_come = True
        child.train(job, *args, **kwargs)

    try:
        with tenant_scope(run.tenant_id):
            execution.run_train_kept(run, train, lambda: child.num_training, _judge_folder)
    finally:
        if not has_come:
            child.leave()
        connection.close()


def _judge_folder(run: TrainingRun, folder: Path) -> Path | None:
    why_not = "a serving worker trains the batch" if settings.TRAINING_SOCKET else ""
    return judging.judge_folder(run, folder, why_not)
