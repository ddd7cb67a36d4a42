"""RunningRun: one attempt at a run, from its claim to the adapter's next version.

It owns what the attempt has: the lease, what the trainer told, the saved state, the adapters kept
on the way, the run's folder. The transaction that moves the run to `publishing` also makes the
version's row: at most one version comes from a run.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from django.conf import settings
from django.db import connection
from django.utils import timezone

from contract.training.job import Hyperparameters, TrainJob
from contract.training.judging import MOST_S, MOST_WAIT_S
from controlplane.adapters import services as adapter_services
from controlplane.adapters.base_model_folder import local_base_model
from controlplane.adapters.models import BaseModel
from controlplane.errors import ApiError
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_STEPS
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.training.datasets import contents
from controlplane.training.models import TrainingRun
from controlplane.training.runs import judging, publishing
from controlplane.training.runs.attempt import Attempt
from controlplane.training.runs.endings import Fault, run_abandon, run_finish, run_give_back
from controlplane.training.runs.hyperparameters import check_size
from controlplane.training.runs.kept.kept_adapters import KeptAdapters
from controlplane.training.runs.kept.kept_folders import KeptFolder
from controlplane.training.runs.kept.saved_states import SavedState
from controlplane.training.runs.lease import RunLease, while_held, with_retry
from controlplane.training.runs.rewards.grading import Grading
from controlplane.training.runs.trainer import (
    NO_ROOM,
    Event,
    Told,
    Trainer,
    TrainerStopped,
    TrainingAbandoned,
    TrainingFailed,
    TrainingPaused,
)
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

#: How often progress is written and a cancellation noticed.
TICK_S = 2.0
#: What a run's scores may take beside their passes, before its time is over.
_SLACK_S = 60.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

Status = TrainingRun.Status


class RunningRun:
    """An attempt at a run that was claimed, in the scope of the run's tenant.

    folder, lock  the run's on this machine's disk: `kept_folders`
    """

    def __init__(self, run: TrainingRun, kept: KeptFolder, trainer: Trainer) -> None:
        self.run, self.folder, self.lock = run, kept.path, kept.lock
        self._attempt = Attempt(run, lambda: trainer.num_training)
        self._lease, self._trainer = RunLease(run), trainer
        self._state = SavedState(run, kept.path, lambda: trainer.num_training)
        self._adapters = KeptAdapters(run, kept.path, self._attempt.warn)
        self._told = Told()
        self._grading = Grading(run, kept.path) if run.hyperparameters.get("grader") else None
        self._next_tick = self._deadline = 0.0
        self._num_steps = 0

    def execute(self) -> None:
        """Have the run trained, publish it, and note how the attempt ended."""
        run = self.run
        log.info("training begins", extra={"attempt": run.attempts, "adapter": run.adapter.name})
        try:
            self._publish(self._train())
        except Exception as error:
            self._note_end(error)

    def _note_end(self, error: Exception) -> None:
        """Note how the attempt ended that made no version."""
        run, fault = self.run, _fault_of(error)
        if isinstance(error, TrainingAbandoned):
            run_abandon(run, self._attempt)
        elif fault is not None:
            run_finish(run, Status.RUNNING, Status.FAILED, fault, self._attempt)
        elif str(error) == NO_ROOM or getattr(error, "errno", None) in _DISK_FULL:
            log.error("the trainer's disk is full: %r", error)
            run_give_back(run, why=NO_ROOM, code="disk_full")
        elif isinstance(error, TrainerStopped):
            run_give_back(run, why=str(error))
        elif isinstance(error, storage.STORAGE_ERRORS):
            log.error("the object store was waited for in vain: %r", error)
            run_give_back(run, why="The object store does not answer", code="server_error")
        else:
            log.error("a training run failed", exc_info=error)
            run_give_back(run)
            # Its version may be complete; let the next tick check that at once.
            self._lease.rows(Status.PUBLISHING).update(lease_until=timezone.now())

    def _train(self) -> Path:
        """Have the run trained, from its saved state if it has one. -> its adapter's folder.

        Raises TrainingAbandoned, TrainerStopped, TrainingFailed, ApiError, and what the store
        raises.
        """
        job = self._job()
        self._attempt.begin()
        if job.output_dir.exists():  # whole: the trainer before was lost as it was to publish it
            for event in self._told.told_before(self.folder):
                self._attempt.note(event)
        else:
            self._state.fetch()
            self._next_tick, self._deadline = 0.0, time.monotonic() + settings.TRAINING_MAX_RUN_S
            try:
                self._trainer.train(job, self)
            except (TrainingPaused, TrainerStopped, TrainingFailed):
                self._state.store_now(self._told.saved_step)
                raise
            self._told.keep(self.folder)
        self._report()
        self._adapters.publish_now()
        return job.output_dir

    def _publish(self, folder: Path) -> None:
        """Make the adapter folder the next version, through the checks of an upload."""
        paths = [folder / name for name in ADAPTER_FILES]
        sizes = {path.name: path.stat().st_size for path in paths}
        version = with_retry(
            self.run, Status.RUNNING, lambda: publishing.version_of(self.run, sizes, self._attempt)
        )
        judging.scores_keep(self.run, version, folder)  # before it is ready, when its gate begins

        def upload() -> None:
            uploaded = adapter_services.adapter_version_upload_files(
                version=version, config_path=paths[0], tensors_path=paths[1]
            )
            publishing.run_conclude(self.run, uploaded)

        with_retry(self.run, Status.PUBLISHING, upload)

    def close(self) -> None:
        """Wait for what is being stored, or graded."""
        if self._grading is not None:
            self._grading.close()
        self._adapters.close()
        self._state.close()

    @property
    def is_done(self) -> bool:
        """Return whether the run's adapter is there."""
        return self._told.is_done

    def note(self, event: Event) -> None:
        """Take in an event of the trainer. Raises TrainingFailed."""
        if self._grading is not None:
            event = self._graded(event, self._grading)
        was_judged = self._told.is_judged
        self._attempt.note(event)
        self._told.note(event)
        if self._told.is_judged and not was_judged:  # it is trained: no reason to fail any more
            self._deadline += MOST_S + MOST_WAIT_S + _SLACK_S

    def _graded(self, event: Event, grading: Grading) -> Event:
        """Have answers graded; return a step's progress with some of them."""
        if event.get("event") == "answers":
            grading.begin(str(event.get("file")))
        if event.get("event") != "progress":
            return event
        while grading.problems:
            self._attempt.warn(grading.problems.pop())
        return {**event, "samples": grading.shown, "grading_s": round(grading.seconds, 1)}

    def tick(self) -> float:
        """Report the progress if that is due. -> the seconds until the next time.

        Raises TrainingAbandoned, TrainingPaused, and TrainingFailed after the time limit.
        """
        now = time.monotonic()
        if self._grading is not None:
            self._grading.check()
        if now >= self._next_tick:
            self._report()
            self._next_tick = now + TICK_S
        if now >= self._deadline:
            raise TrainingFailed(
                "The training exceeded the time limit. Train fewer steps.", code="time_limit"
            )
        return max(0.0, self._next_tick - now)

    def _report(self) -> None:
        """Write the progress, and store what is due. Raises TrainingAbandoned, TrainingPaused."""
        step, before = self._told.progress.get("step", 0), self._num_steps
        TRAINING_STEPS.inc(max(0, step - before))
        self._num_steps = step
        try:
            self._write_progress()
        except DATABASE_OUTAGE as error:
            # Nobody else can take the run while the database is away; later the lease is checked.
            log.warning("training continues without the database: %r", error)
            connection.close()
        self._adapters.publish_if_due()
        if problem := self._state.store_if_due(self._told.saved_step):
            self._attempt.warn(problem)

    def _write_progress(self) -> None:
        advanced = {"num_lost": 0} if self._attempt.has_advanced else {}
        progress = self._attempt.progress(self._told.progress)
        if self._lease.renew(Status.RUNNING, progress=progress, **advanced):
            self._attempt.write()
            return
        wanted = self._lease.rows(Status.RUNNING).filter(cancel_requested=False)
        if wanted.filter(pause_requested=True).exists():
            raise TrainingPaused
        raise TrainingAbandoned

    def _job(self) -> TrainJob:
        """Fetch what the run is trained on. Raises TrainingAbandoned, TrainingFailed, ApiError."""
        run, folder = self.run, self.folder
        if run.dataset is None and run.training_file_id is None:
            raise TrainingAbandoned  # it was deleted, and the run cancelled with it
        check_size(run.hyperparameters, run.num_rows or 0)  # the limits may be lower by now
        output = folder / "adapter"
        job = TrainJob(
            base_model_dir=_base_model_dir(run.adapter.base_model),
            base_model=run.adapter.base_model.name,
            dataset=folder / "dataset.jsonl",
            output_dir=output,
            hyperparameters=Hyperparameters.from_dict(run.hyperparameters),
            gpu_share=settings.TRAINER_GPU_SHARE,
            validation_dataset=folder / "validation.jsonl" if run.validation_sha256 else None,
            salt=_salt(run),
            most_steps=quotas.allowed("training_steps"),
            most_tokens=quotas.allowed("training_tokens"),
            warm_start=self._warm_start(),
            kept_dir=self._adapters.path,
            judge_dir=None if output.exists() else judging.judge_folder(run, folder),
            rewards_dir=None if self._grading is None else self._grading.folder,
        )
        if job.rewards_dir is not None:
            shutil.rmtree(job.rewards_dir, ignore_errors=True)
            job.rewards_dir.mkdir()
        self._fetch(lambda: contents.pieces(run.dataset_sha256), job.dataset)
        if job.validation_dataset is not None:
            self._fetch(lambda: contents.pieces(run.validation_sha256), job.validation_dataset)
        return job

    def _warm_start(self) -> Path | None:
        """Fetch the tensors that the run begins from; None: it begins from PEFT's initial ones."""
        run, path = self.run, self.folder / "warm_start.safetensors"
        if not run.warm_start_name:
            return None
        version = run.warm_start
        if version is None or version.removed_at is not None:
            raise TrainingFailed(
                f"{run.warm_start_name}, from which the run was to begin, is gone.",
                code="model_not_found",
                field="warm_start",
            )
        key, num_bytes = version.tensors_key, version.num_bytes
        self._fetch(lambda: storage.read_pieces(key, max_bytes=num_bytes), path)
        return path

    def _fetch(self, pieces: Callable[[], Iterator[bytes]], path: Path) -> None:
        """Write stored bytes to a file. Raises storage.ObjectMissing, storage.STORAGE_ERRORS."""

        def fetch() -> None:
            with path.open("wb") as file:
                file.writelines(while_held(self.run, pieces()))

        with_retry(self.run, Status.RUNNING, fetch)


def _fault_of(error: Exception) -> Fault | None:
    """Return what is wrong with the run itself; None: it may be trained again."""
    if isinstance(error, TrainingFailed):
        return Fault(str(error), error.code, error.field)
    if isinstance(error, ApiError):
        return Fault(error.message, error.code or "invalid_job", error.param or "")
    if isinstance(error, storage.ObjectMissing):
        return Fault("The dataset is gone. Upload it again.", "dataset_gone", "dataset")
    return None


def _salt(run: TrainingRun) -> str:
    """Return what chooses the rows to validate with.

    It is the dataset's, or the file's, so that a prompt is on the same side in each of its runs.
    """
    found = run.training_file_id if run.dataset is None else run.dataset.pk
    assert found is not None
    return found.hex


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
