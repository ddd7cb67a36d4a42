"""Execute a training run, from the queue to the adapter's next version.

The trainer that moves a run from queued to running owns it, under the number of that attempt; every
later write checks both. So a message that is delivered twice trains once, and a trainer that was
considered lost changes nothing when it comes back. The transaction that moves the run to
`publishing` also makes the version's row: at most one version comes from a run.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import errno
import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.utils import timezone
from structlog.contextvars import bound_contextvars

from contract.training import Hyperparameters, TrainJob
from controlplane.adapters import services as adapter_services
from controlplane.adapters.base_model_folder import local_base_model
from controlplane.adapters.ingest import version_drop
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.errors import ApiError
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_STEPS
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.limits import quotas, turns
from controlplane.limits.models import Turn
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training import contents, events, judging, picking, sending, size
from controlplane.training.attempt import Attempt
from controlplane.training.endings import Fault, run_abandon, run_finish, run_give_back
from controlplane.training.kept_adapters import KeptAdapters
from controlplane.training.kept_folders import folders_sweep, kept_folder
from controlplane.training.lease import (
    PUBLISHING_LEASE,
    RUNNING_LEASE,
    RunLease,
    while_held,
    with_retry,
)
from controlplane.training.models import TrainingRun
from controlplane.training.saved_states import SavedState
from controlplane.training.trainer import (
    NO_ROOM,
    Listener,
    TrainerStopped,
    TrainingAbandoned,
    TrainingFailed,
    TrainingPaused,
    run_trainer,
)

log = logging.getLogger(__name__)

#: How often progress is written and a cancellation noticed.
TICK_S = 2.0
#: The state of a run that is trained by itself is on the disk at most so long after it was.
CHECKPOINT_S = 30.0
#: How often a tick looks at a published version that is not ready yet.
LOOK_AGAIN = dt.timedelta(seconds=15)
#: How often a trainer chooses again when another one was faster.
_MAX_TRIES = 100
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

Status = TrainingRun.Status

#: Called with a run whose version is ready, before it succeeds: may be repeated, and raises what
#: the store raises. Rooms above this one add what they make of a run.
BEFORE_SUCCESS: list[Callable[[TrainingRun], None]] = []


def run_claim_next(
    *, beside: TrainingRun | None = None, in_turn: bool = False
) -> TrainingRun | None:
    """Take the run that is next, `picking.next_run`, for this trainer; None: there is none.

    in_turn  only if it is the next of all, too: `picking.next_to_join`
    """
    for _ in range(_MAX_TRIES):
        if beside is not None and in_turn:
            run = picking.next_to_join(beside)
        else:
            run = picking.next_run(beside=beside)
        if run is None:
            return None
        with tenant_scope(run.tenant_id):
            claimed = _claim(run.pk)
        if claimed is not None:  # else another trainer was faster
            return claimed
    return None


def training_run_next() -> None:
    """Train and publish the run that is next, if there is one."""
    run = run_claim_next()
    if run is None:
        return
    folders_sweep()
    with tenant_scope(run.tenant_id):
        run_train_kept(run, _train_alone)
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
    run = _claim(run_id)
    if run is None:
        return False
    run_train_kept(run, _train_alone)
    return True


def run_train_kept(
    run: TrainingRun,
    trainer: Callable[..., None],
    num_sharing: Callable[[], int] = lambda: 1,
    judge_folder: Callable[[TrainingRun, Path], Path | None] = lambda run, folder: None,
) -> None:
    """Train a run that was claimed, from its saved state if it has one; publish it; note its end.

    trainer       trains it, as `run_trainer` does
    num_sharing   how many runs use the device now
    judge_folder  `judging.judge_folder`, if the trainer scores what it trains
    """
    with kept_folder(run.pk, run.attempts) as kept:
        state = SavedState(run, kept.path, num_sharing)
        attempt = Attempt(run, num_sharing)
        adapters = KeptAdapters(run, kept.path, attempt.warn)

        def train(job: TrainJob, folder: Path, listener: Listener, **kwargs: Any) -> None:
            state.fetch()
            step = 0

            def listen(progress: dict[str, Any]) -> bool:
                nonlocal step
                step = progress.get("saved_step", step)
                is_ours = listener(progress)
                if is_ours:
                    adapters.publish_if_due()
                    if problem := state.store_if_due(step):
                        attempt.warn(problem)
                return is_ours

            job = dataclasses.replace(
                job, checkpoint=state.path, checkpoint_s=CHECKPOINT_S, kept_dir=adapters.path
            )
            if not job.output_dir.exists():  # else it was trained already, by an earlier attempt
                job = dataclasses.replace(job, judge_dir=judge_folder(run, kept.path))
            try:
                trainer(job, folder, listen, lock=kept.lock, **kwargs)
                adapters.publish_now()
            except (TrainingPaused, TrainerStopped, TrainingFailed):
                state.store_now(step)
                raise

        try:
            run_train(run, kept.path, attempt, train)
        finally:
            adapters.close()
            state.close()


def run_train(
    run: TrainingRun, folder: Path, attempt: Attempt, trainer: Callable[..., None]
) -> None:
    """Train a run that was claimed, in `folder`, publish it, and note how it ended."""
    begun = {"attempt": run.attempts, "adapter": run.adapter.name}
    with bound_contextvars(run_id=str(run.pk)):
        log.info("training begins", extra=begun)
        try:
            _publish(run, _train(run, folder, attempt, trainer), attempt)
        except TrainingAbandoned:
            run_abandon(run, attempt)
        except TrainerStopped as error:
            run_give_back(run, why=str(error), code=_code_of(error))
        except TrainingFailed as error:
            fault = Fault(str(error), error.code, error.field)
            run_finish(run, Status.RUNNING, Status.FAILED, fault, attempt)
        except ApiError as error:
            fault = Fault(error.message, error.code or "invalid_job", error.param or "")
            run_finish(run, Status.RUNNING, Status.FAILED, fault, attempt)
        except storage.ObjectMissing:
            fault = Fault("The dataset is gone. Upload it again.", "dataset_gone", "dataset")
            run_finish(run, Status.RUNNING, Status.FAILED, fault, attempt)
        except storage.STORAGE_ERRORS as error:
            log.error("the object store was waited for in vain: %r", error)
            run_give_back(run, why="The object store does not answer", code="server_error")
        except Exception as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                log.error("the trainer's disk is full: %r", error)
                run_give_back(run, why=NO_ROOM, code="disk_full")
                return
            log.exception("a training run failed")
            run_give_back(run)
            # Its version may be complete; let the next tick check that at once.
            RunLease(run).rows(Status.PUBLISHING).update(lease_until=timezone.now())


def _code_of(error: TrainerStopped) -> str:
    return "disk_full" if str(error) == NO_ROOM else "trainer_lost"


@transaction.atomic
def _claim(run_id: uuid.UUID) -> TrainingRun | None:
    quotas.lock("training_at_once")  # two runs that begin at the same time count each other
    if not picking.runs_that_may_begin().filter(pk=run_id).exists():
        return None
    queued = TrainingRun.objects.filter(
        pk=run_id, status=Status.QUEUED, cancel_requested=False, pause_requested=False
    )
    taken = RunLease.take(
        queued, RUNNING_LEASE, status=Status.RUNNING, started_at=timezone.now(), progress={}
    )
    if not taken:
        return None
    turns.taken(Turn.Kind.TRAINING)
    related = ("adapter__base_model", "created_by", "dataset", "warm_start")
    run = TrainingRun.objects.select_related(*related).get(pk=run_id)
    events.event_add(run, "Fine-tuning job started", attempt=run.attempts)
    return run


def _train(run: TrainingRun, folder: Path, attempt: Attempt, trainer: Callable[..., None]) -> Path:
    """Train in `folder`. -> the folder of the trained adapter."""
    if run.dataset is None and run.training_file_id is None:
        raise TrainingAbandoned  # it was deleted, and the run cancelled with it
    num_rows = run.num_rows
    if num_rows is None and run.dataset is not None:  # made before a run knew its rows
        num_rows = run.dataset.num_rows
    size.check(run.hyperparameters, num_rows or 0)  # a schedule's dataset may have grown since
    job = TrainJob(
        base_model_dir=_base_model_dir(run.adapter.base_model),
        base_model=run.adapter.base_model.name,
        dataset=folder / "dataset.jsonl",
        output_dir=folder / "adapter",
        hyperparameters=Hyperparameters.from_dict(run.hyperparameters),
        gpu_share=settings.TRAINER_GPU_SHARE,
        validation_dataset=folder / "validation.jsonl" if run.validation_sha256 else None,
        salt=_salt(run),
        most_steps=quotas.allowed("training_steps"),
        most_tokens=quotas.allowed("training_tokens"),
        warm_start=_warm_start(run, folder),
    )
    _fetch(run, lambda: contents.pieces(run.dataset_sha256), job.dataset)
    if job.validation_dataset is not None:
        _fetch(run, lambda: contents.pieces(run.validation_sha256), job.validation_dataset)
    lease, steps = RunLease(run), 0

    def report(progress: dict[str, Any]) -> bool:
        nonlocal steps
        steps, before = progress.get("step", 0), steps
        TRAINING_STEPS.inc(max(0, steps - before))
        try:
            advanced = {"num_lost": 0} if attempt.has_advanced else {}
            changes = {"progress": attempt.progress(progress), **advanced}
            if lease.renew(Status.RUNNING, **changes):
                attempt.write()
                return True
            wanted = lease.rows(Status.RUNNING).filter(cancel_requested=False)
            if wanted.filter(pause_requested=True).exists():
                raise TrainingPaused
            return False
        except DATABASE_OUTAGE as error:
            # Nobody else can take the run while the database is away; later the lease is checked.
            log.warning("training goes on without the database: %r", error)
            connection.close()
            return True

    attempt.begin()
    limits = {"tick_s": TICK_S, "timeout_s": settings.TRAINING_MAX_RUN_S}
    trainer(job, folder, report, reader=attempt.note, **limits)
    return job.output_dir


def _train_alone(*args: Any, **kwargs: Any) -> None:
    run_trainer(*args, environment=settings.TRAINER_ENVIRONMENT, **kwargs)


def _salt(run: TrainingRun) -> str:
    """Return what chooses the rows to validate with: of the dataset, or the file, so that a prompt
    is on the same side in each of its runs."""
    found = run.training_file_id if run.dataset is None else run.dataset.pk
    assert found is not None
    return found.hex


def _fetch(run: TrainingRun, pieces: Callable[[], Iterator[bytes]], path: Path) -> None:
    """Write stored bytes to a file. Raises storage.ObjectMissing, storage.STORAGE_ERRORS."""

    def fetch() -> None:
        with path.open("wb") as file:
            file.writelines(while_held(run, pieces()))

    with_retry(run, Status.RUNNING, fetch)


def _warm_start(run: TrainingRun, folder: Path) -> Path | None:
    """Fetch the tensors that the run begins from; None: it begins from PEFT's initial ones."""
    if not run.warm_start_name:
        return None
    version, path = run.warm_start, folder / "warm_start.safetensors"
    if version is None or version.removed_at is not None:
        raise TrainingFailed(
            f"{run.warm_start_name}, from which the run was to begin, is gone.",
            code="model_not_found",
            field="warm_start",
        )
    key, num_bytes = version.tensors_key, version.num_bytes
    _fetch(run, lambda: storage.read_pieces(key, max_bytes=num_bytes), path)
    return path


def _base_model_dir(base_model: BaseModel) -> Path:
    """Return the base model's folder on this machine.

    Raises TrainingFailed if the folder has another model, or the model has been shut down.
    """
    if base_model.is_shut_down:
        raise TrainingFailed(f"{base_model.name} was shut down on {base_model.shutdown_date}.")
    if (found := local_base_model(base_model.name)) is None:
        raise TrainingFailed(f"The trainer does not have the model {base_model.name}.")
    if found.revision != base_model.revision:
        raise TrainingFailed(f"The trainer has another revision of {base_model.name}.")
    return found.path


def _publish(run: TrainingRun, folder: Path, attempt: Attempt) -> None:
    """Make the adapter folder the next version, through the checks of an upload."""
    config_path, tensors_path = (folder / name for name in ADAPTER_FILES)
    sizes = {path.name: path.stat().st_size for path in (config_path, tensors_path)}
    version = with_retry(run, Status.RUNNING, lambda: _version_of(run, sizes, attempt))
    judging.scores_keep(run, version, folder)  # before it is ready, when its gate begins

    def upload() -> None:
        uploaded = adapter_services.adapter_version_upload_files(
            version=version, config_path=config_path, tensors_path=tensors_path
        )
        run_conclude(run, uploaded)

    with_retry(run, Status.PUBLISHING, upload)


@transaction.atomic
def _version_of(run: TrainingRun, sizes: dict[str, int], attempt: Attempt) -> AdapterVersion:
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
        for prepare in BEFORE_SUCCESS:
            prepare(run)
        run_finish(run, Status.PUBLISHING, Status.SUCCEEDED)
    elif version.status == AdapterVersion.Status.REJECTED:
        reasons = "; ".join(f"{reason['field']}: {reason['message']}" for reason in version.reasons)
        error = f"The trained adapter was rejected: {reasons}"
        run_finish(run, Status.PUBLISHING, Status.FAILED, Fault(error, "adapter_rejected"))
    else:  # it waits for its probe
        rows = RunLease(run).rows(Status.PUBLISHING)
        rows.update(lease_until=timezone.now() + LOOK_AGAIN)
