"""Train several queued runs of one base model together, in one child process.

Each run keeps what it has alone: its claim, its lease, its attempts, its time limit, its end. A
thread of its own does all of it; only the child is shared.
"""

from __future__ import annotations

import threading
from typing import Any

from django.conf import settings
from django.db import connection

from contract.training import TrainJob
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import execution, picking
from controlplane.training.batch_child import BatchChild
from controlplane.training.kept_folders import folders_sweep
from controlplane.training.models import TrainingRun


def training_next() -> None:
    """Train and publish the run that is next, and beside it others of its base model.

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
    """Train and publish runs of one base model that were claimed; returns when all have ended."""
    folders_sweep()
    with scratch_folder("batch-") as folder:
        child = BatchChild(
            folder, len(runs), settings.TRAINER_ENVIRONMENT, settings.TRAINING_SOCKET
        )
        threads = [
            threading.Thread(target=_train_one, args=(run, child), name=f"run-{run.pk}")
            for run in runs
        ]
        for thread in threads:
            thread.start()
        try:
            child.run()
        finally:
            for thread in threads:
                thread.join()
    folders_sweep()


def _train_one(run: TrainingRun, child: BatchChild) -> None:
    """Do one run from its rows to its version, in its tenant's scope."""
    has_come = False

    def train(job: TrainJob, *args: Any, **kwargs: Any) -> None:
        nonlocal has_come
        has_come = True
        child.train(job, *args, **kwargs)

    try:
        with tenant_scope(run.tenant_id):
            execution.run_train_kept(run, train, num_sharing=lambda: child.num_training)
    finally:
        if not has_come:
            child.leave()
        connection.close()
