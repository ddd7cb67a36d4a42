"""Execute a training run, from the queue to the adapter's next version.

The trainer that moves a run from queued to running owns it, under the number of that attempt; every
later write checks both. So a message that is delivered twice trains once, and a trainer that was
considered lost changes nothing when it comes back. The transaction that moves the run to
`publishing` also makes the version's row: at most one version comes from a run.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone
from structlog.contextvars import bound_contextvars

from contract.base_model import BaseModelFolder, NotABaseModel, find_base_model
from contract.training import Hyperparameters, TrainJob
from controlplane.adapters import services as adapter_services
from controlplane.adapters.base_model_folder import configured_base_model
from controlplane.adapters.ingest import version_drop
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.audit.services import record
from controlplane.errors import ApiError
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_ENDED, TRAINING_STEPS
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.infra.temp_folders import scratch_folder
from controlplane.limits import quotas, turns
from controlplane.limits.models import Turn
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training import picking, services, size
from controlplane.training.lease import PUBLISHING_LEASE, RUNNING_LEASE, RunLease, with_retry
from controlplane.training.loss_curve import LossCurve
from controlplane.training.models import TrainingRun
from controlplane.training.trainer import (
    MAX_ERROR_CHARS,
    TrainerStopped,
    TrainingAbandoned,
    TrainingFailed,
    run_trainer,
)

log = logging.getLogger(__name__)

#: How often progress is written and a cancellation noticed.
TICK_S = 2.0
MAX_ATTEMPTS = 3
#: How often a trainer chooses again when another one was faster.
_MAX_TRIES = 100
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

Status = TrainingRun.Status


def training_run_next() -> None:
    """Train and publish the run that is next, if there is one."""
    for _ in range(_MAX_TRIES):
        run = picking.next_run()
        if run is None:
            return
        with tenant_scope(run.tenant_id):
            if training_run_execute(run.pk):  # else another trainer was faster
                break
    # The message for the tenant's next run may have been delivered, and dropped, during this run.
    waiting = picking.next_run()
    if waiting is not None:
        services.training_run_send(waiting)


def training_run_execute(run_id: uuid.UUID) -> bool:
    """Train and publish a queued run of the tenant in scope. -> False if it may not begin now."""
    run = _claim(run_id)
    if run is None:
        return False
    begun = {"attempt": run.attempts, "adapter": run.adapter.name}
    with bound_contextvars(run_id=str(run.pk)), scratch_folder("train-") as folder:
        log.info("training begins", extra=begun)
        try:
            _publish(run, _train(run, folder))
        except TrainingAbandoned:
            # Either the run was cancelled, or another trainer owns it now.
            _finish(run, Status.RUNNING, Status.CANCELLED)
        except TrainerStopped:
            _give_back(run)
        except (TrainingFailed, ApiError) as error:
            _finish(run, Status.RUNNING, Status.FAILED, str(error))
        except storage.ObjectMissing:
            _finish(run, Status.RUNNING, Status.FAILED, "The dataset is gone. Upload it again.")
        except storage.STORAGE_ERRORS:
            _finish(run, Status.RUNNING, Status.FAILED, "The object store does not answer.")
        except Exception:
            log.exception("a training run failed")
            _give_back(run)
            # Its version may be complete; let the next tick check that at once.
            RunLease(run).rows(Status.PUBLISHING).update(lease_until=timezone.now())
    return True


@transaction.atomic
def _claim(run_id: uuid.UUID) -> TrainingRun | None:
    quotas.lock("training_at_once")  # two runs that begin at the same time count each other
    if not picking.runs_that_may_begin().filter(pk=run_id).exists():
        return None
    queued = TrainingRun.objects.filter(pk=run_id, status=Status.QUEUED, cancel_requested=False)
    taken = RunLease.take(
        queued, RUNNING_LEASE, status=Status.RUNNING, started_at=timezone.now(), progress={}
    )
    if not taken:
        return None
    turns.taken(Turn.Kind.TRAINING)
    related = ("adapter__base_model", "created_by", "dataset")
    return TrainingRun.objects.select_related(*related).get(pk=run_id)


@transaction.atomic
def _finish(run: TrainingRun, expected: Status, status: Status, error: str = "") -> None:
    rows = RunLease(run).rows(expected)
    moved = rows.update(
        status=status, error=error[:MAX_ERROR_CHARS], finished_at=timezone.now(), lease_until=None
    )
    if moved:
        record("ended", run, after={"status": status, "error": error[:1000]})
        # Not the error, which may quote a row.
        extra = {"run_id": str(run.pk), "status": status.value, "adapter": run.adapter.name}
        log.info("training ended", extra=extra)
        TRAINING_ENDED.labels(status.value).inc()


def _give_back(run: TrainingRun, status: Status = Status.RUNNING) -> None:
    """Queue an interrupted run again; after `MAX_ATTEMPTS` let it fail."""
    if run.attempts >= MAX_ATTEMPTS:
        error = (
            f"The trainer was lost {run.attempts} times. If it ran out of memory, use a smaller "
            "batch_size or max_length. Its log says more."
        )
        _finish(run, status, Status.FAILED, error)
        return
    # Not sent now: the trainer may be shutting down. The reconcile tick sends it.
    RunLease(run).rows(status).update(status=Status.QUEUED, lease_until=timezone.now())
    services.training_run_drop(run=run)


def _train(run: TrainingRun, folder: Path) -> Path:
    """Train in `folder`. -> the folder of the trained adapter."""
    if run.dataset is None:
        raise TrainingAbandoned  # it was deleted, and the run cancelled with it
    size.check(run.hyperparameters, run.dataset)  # a schedule's dataset may have grown since
    job = TrainJob(
        base_model_dir=_base_model_dir(run.adapter.base_model),
        base_model=run.adapter.base_model.name,
        dataset=folder / "dataset.jsonl",
        output_dir=folder / "adapter",
        hyperparameters=Hyperparameters.from_dict(run.hyperparameters),
        gpu_share=settings.TRAINER_GPU_SHARE,
    )
    rows = with_retry(
        run,
        Status.RUNNING,
        lambda: storage.read_bytes(run.dataset_key, max_bytes=services.MAX_DATASET_BYTES),
    )
    job.dataset.write_bytes(rows)
    curve, lease, steps = LossCurve(), RunLease(run), 0

    def report(progress: dict[str, Any]) -> bool:
        nonlocal steps
        steps, before = progress.get("step", 0), steps
        TRAINING_STEPS.inc(max(0, steps - before))
        if progress.get("loss") is not None:
            curve.add(progress["step"], progress["loss"])
            progress = {**progress, "losses": curve.points}
        try:
            return lease.renew(Status.RUNNING, progress=progress)
        except DATABASE_OUTAGE as error:
            # Nobody else can take the run while the database is away; later the lease is checked.
            log.warning("training goes on without the database: %r", error)
            connection.close()
            return True

    run_trainer(
        job,
        folder,
        report,
        environment=settings.TRAINER_ENVIRONMENT,
        tick_s=TICK_S,
        timeout_s=settings.TRAINING_MAX_RUN_S,
    )
    return job.output_dir


def _base_model_dir(base_model: BaseModel) -> Path:
    """Return the base model's folder on this machine.

    Raises TrainingFailed if the folder has another model, or the model has been shut down.
    """
    if base_model.is_shut_down:
        raise TrainingFailed(f"{base_model.name} was shut down on {base_model.shutdown_date}.")
    if (found := _find_base_model(base_model)) is None:
        raise TrainingFailed(f"The trainer does not have the model {base_model.name}.")
    if found.revision != base_model.revision:
        raise TrainingFailed(f"The trainer has another revision of {base_model.name}.")
    return found.path


def _find_base_model(base_model: BaseModel) -> BaseModelFolder | None:
    """Return this machine's model of that name; None if it has none."""
    with contextlib.suppress(NotABaseModel):
        found = configured_base_model()
        if found is not None and found.name == base_model.name:
            return found
    with contextlib.suppress(NotABaseModel):
        return find_base_model(settings.BASE_MODEL_DIR / base_model.name, name=base_model.name)
    return None


def _publish(run: TrainingRun, folder: Path) -> None:
    """Make the adapter folder the next version, through the checks of an upload."""
    config_path, tensors_path = (folder / name for name in ADAPTER_FILES)
    sizes = {path.name: path.stat().st_size for path in (config_path, tensors_path)}
    version = with_retry(run, Status.RUNNING, lambda: _version_of(run, sizes))

    def upload() -> None:
        uploaded = adapter_services.adapter_version_upload_files(
            version=version, config_path=config_path, tensors_path=tensors_path
        )
        _conclude(run, uploaded)

    with_retry(run, Status.PUBLISHING, upload)


@transaction.atomic
def _version_of(run: TrainingRun, sizes: dict[str, int]) -> AdapterVersion:
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
    return version


def _conclude(run: TrainingRun, version: AdapterVersion | None) -> None:
    """End a publishing run as its version ended; without a version, train it again."""
    if version is not None and version.status == AdapterVersion.Status.UPLOADING:
        # First, so that a lost trainer that wakes up cannot publish any more.
        if version_drop(version, "the trainer was lost before its files were there"):
            _give_back(run, Status.PUBLISHING)
    elif version is None:
        _give_back(run, Status.PUBLISHING)
    elif version.status in {AdapterVersion.Status.READY, AdapterVersion.Status.RETIRED}:
        _finish(run, Status.PUBLISHING, Status.SUCCEEDED)
    elif version.status == AdapterVersion.Status.REJECTED:
        reasons = "; ".join(f"{reason['field']}: {reason['message']}" for reason in version.reasons)
        error = f"The trained adapter was rejected: {reasons}"
        _finish(run, Status.PUBLISHING, Status.FAILED, error)


def training_runs_reconcile() -> None:
    """Handle the runs of all tenants whose lease has ended: the second half of a tick.

    A queued run is sent again, a running one is queued again, a publishing one ends as its version
    did; if the version's check was lost, that is queued again.
    """
    with all_tenants(reason="find lost runs of all tenants"):
        lost = list(
            TrainingRun.objects.filter(
                status__in=TrainingRun.ACTIVE, lease_until__lte=timezone.now()
            )
            .select_related("version")
            .order_by("lease_until")[:100]
        )
    for run in lost:
        with tenant_scope(run.tenant_id):
            try:
                _reconcile(run)
            except Exception:  # continue with the others
                log.exception("a lost run was not handled", extra={"run_id": str(run.pk)})


def _reconcile(run: TrainingRun) -> None:
    if run.status == Status.RUNNING:
        log.warning("a trainer was lost", extra={"run_id": str(run.pk), "attempt": run.attempts})
        _give_back(run)
    elif run.status == Status.PUBLISHING:
        _reconcile_publishing(run)
    services.training_run_drop(run=run)
    # Also a run that was queued again just now. Of two concurrent ticks one sends it.
    queued = TrainingRun.objects.filter(pk=run.pk, status=Status.QUEUED)
    may_begin = picking.runs_that_may_begin().filter(pk=run.pk).exists()
    until = services.queue_lease_until()
    if queued.filter(lease_until__lte=timezone.now()).update(lease_until=until):
        if may_begin:  # else it is sent when a running one ends, or the window opens
            services.training_run_send(run)


def _reconcile_publishing(run: TrainingRun) -> None:
    version = run.version
    if version is not None and version.status in {
        AdapterVersion.Status.UPLOADED,
        AdapterVersion.Status.VALIDATING,
    }:
        RunLease(run).rows(Status.PUBLISHING).update(lease_until=timezone.now() + RUNNING_LEASE)
        adapter_services.adapter_version_complete(version=version)
    else:
        _conclude(run, version)
