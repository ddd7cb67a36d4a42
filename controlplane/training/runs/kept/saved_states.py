"""A run's state in the object store, from which a trainer on another machine resumes.

The child, which has no keys of the store, writes states beside its job; the task copies them. Each
attempt has a key of its own: a trainer that was considered lost replaces no newer state.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from django.db import transaction
from django.db.models import Q, Sum
from django.utils import timezone

from controlplane.errors import InvalidRequest
from controlplane.infra import storage
from controlplane.infra.metrics import TRAINING_STATES
from controlplane.infra.outages import DATABASE_OUTAGE, STORE_OUTAGE
from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingRun
from controlplane.training.runs.lease import RunLease, while_held, with_retry
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

#: What a machine sends to the store in a second: large states of many runs are sent less often.
STORE_BYTES_PER_S = 100e6
#: Where the child writes it, in the run's folder: as `worker.training.disk` does.
CHECKPOINT = Path("checkpoint") / "checkpoint.safetensors"
#: Time for which the last good state of a failed run is kept.
KEPT = dt.timedelta(days=7)
#: Runs whose states one sweep removes.
MAX_PER_SWEEP = 1000
#: More than any state has.
_MAX_BYTES = 1 << 36
Status = TrainingRun.Status
_DONE = (Status.SUCCEEDED, Status.CANCELLED)


def storage_used() -> int:
    """Return the bytes of the saved states of the tenant in scope.

    Not of a run that publishes: its state goes with its end, and leaves its room to the adapter.
    """
    runs = TrainingRun.objects.exclude(status=Status.PUBLISHING)
    return int(runs.aggregate(sum=Sum("stored_bytes"))["sum"] or 0)


def _prefix(run: TrainingRun) -> str:
    return f"t/{run.tenant_id}/checkpoints/{run.pk}."


def _attempt_of(key: str, prefix: str) -> int:
    """Return the attempt whose state has this key; 0: it is of the release before."""
    first = key.removeprefix(prefix).partition(".")[0]
    return int(first) if first.isdigit() else 0


def _forget(run: TrainingRun) -> None:
    """Remove the run's states. Raises STORE_OUTAGE."""
    storage.delete(list(storage.keys(_prefix(run))))
    TrainingRun.objects.filter(pk=run.pk).update(stored_step=None, stored_bytes=0)


def states_forget(runs: list[TrainingRun]) -> None:
    """Forget the states of runs that are deleted. Raises Unavailable."""
    with storage.answering():
        for run in runs:
            _forget(run)


def states_sweep() -> None:
    """Forget the states of runs that ended while no trainer had them, or failed long ago."""
    with all_tenants(reason="the runs that ended are of all tenants"):
        ended = TrainingRun.objects.filter(
            Q(status__in=_DONE) | Q(status=Status.FAILED, finished_at__lt=timezone.now() - KEPT),
            stored_step__isnull=False,
        )
        for run in ended.order_by("finished_at")[:MAX_PER_SWEEP]:
            _forget(run)


class SavedState:
    """The state of one attempt at a run, on the disk and in the store.

    warn         gets what its owner should know
    num_sharing  how many runs are trained here now
    """

    def __init__(
        self, run: TrainingRun, folder: Path, num_sharing: Callable[[], int] = lambda: 1
    ) -> None:
        self._run, self._folder, self._num_sharing = run, folder, num_sharing
        self._path = folder / CHECKPOINT
        self._key = f"{_prefix(run)}{run.attempts}.safetensors"
        self._due_at = 0.0
        self._stored_ns = 0
        self._upload: threading.Thread | None = None
        self._problem: str | None = None
        self._is_told = False

    def fetch(self) -> None:
        """Put the run's newest state where the child looks for one.

        The disk has it if the attempt before this one was made here; else the store may have one.
        """
        attempt = self._folder / "attempt"
        last = attempt.read_text() if attempt.exists() else ""
        if last != str(self._run.attempts - 1):
            shutil.rmtree(self._path.parent, ignore_errors=True)
            if self._run.attempts > 1:
                with_retry(self._run, Status.RUNNING, self._download)
        attempt.write_text(str(self._run.attempts))

    def _download(self) -> None:
        prefix = _prefix(self._run)
        found = {_attempt_of(key, prefix): key for key in storage.keys(prefix)}
        if not found:
            return
        self._path.parent.mkdir(exist_ok=True)
        part = self._path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                pieces = storage.read_pieces(found[max(found)], max_bytes=_MAX_BYTES)
                file.writelines(while_held(self._run, pieces))
        except storage.ObjectMissing:
            part.unlink()
            return
        part.replace(self._path)

    def store_if_due(self, step: int) -> str | None:
        """Begin to copy the newest state, of about this step, if it is time to; does not wait.

        -> what the run's owner is to be told, once: that the store, or the quota, takes none.
        """
        if self._upload is not None and self._upload.is_alive():
            return None
        if time.monotonic() >= self._due_at and (copy := self._new_copy()) is not None:
            num_bytes = copy.stat().st_size
            try:
                # First, so that it is found and removed whatever happens now.
                self._reserve(step, num_bytes)
            except DATABASE_OUTAGE:
                self._stored_ns = 0
                return None
            except InvalidRequest as error:
                self._not_stored(f"The job's state stays on the trainer's disk. {error}")
            else:
                self._upload = threading.Thread(target=self._store, args=(copy,))
                self._upload.start()
            pause_s = num_bytes * self._num_sharing() / STORE_BYTES_PER_S
            self._due_at = time.monotonic() + pause_s
        problem, self._problem = self._problem, None
        return problem

    @transaction.atomic
    def _reserve(self, step: int, num_bytes: int) -> None:
        """Count a state in the tenant's storage. Raises InvalidRequest where it has no room."""
        quotas.lock("storage_bytes")
        rows = RunLease(self._run).rows(Status.RUNNING)
        counted = rows.values_list("stored_bytes", flat=True).first()
        if counted is None:  # it is somebody else's: nothing is to be counted for it here
            return
        if num_bytes > counted:
            quotas.check("storage_bytes", num_bytes - counted)
        rows.update(stored_step=step, stored_bytes=num_bytes)

    def store_now(self, step: int) -> None:
        """Copy the newest state and wait for it, so that another machine can resume the run."""
        self._due_at = 0.0
        self._wait()
        self.store_if_due(step)
        self._wait()

    def _new_copy(self) -> Path | None:
        """Return a name of its own for the newest state, unless that was copied already."""
        try:
            written_ns = self._path.stat().st_mtime_ns
            if written_ns == self._stored_ns:
                return None
            # The child puts the next state in the place of this one.
            copy = self._folder / "uploading"
            copy.unlink(missing_ok=True)
            os.link(self._path, copy)
        except FileNotFoundError:  # there is none yet, or not any more
            return None
        self._stored_ns = written_ns
        return copy

    def _store(self, copy: Path) -> None:
        """Send a copy to the store; older attempts' states are not needed then."""
        prefix = _prefix(self._run)
        try:
            storage.upload(copy, self._key)
            older = [k for k in storage.keys(prefix) if _attempt_of(k, prefix) < self._run.attempts]
            storage.delete(older)
        except storage.STORAGE_ERRORS as error:
            log.warning("a training's state was not stored: %r", error)
            self._not_stored(
                "The object store does not take the job's state; the job continues, and its state "
                "is on the trainer's disk"
            )
        else:
            TRAINING_STATES.labels("stored").inc()
            self._is_told = False

    def _not_stored(self, problem: str) -> None:
        TRAINING_STATES.labels("failed").inc()
        self._stored_ns = 0  # again, as soon as it is due
        if not self._is_told:
            self._is_told, self._problem = True, problem

    def _wait(self) -> None:
        if self._upload is not None:
            self._upload.join()

    def close(self) -> None:
        """Wait for the copy that is under way; forget the states if the run ended well."""
        self._wait()
        try:
            run = TrainingRun.objects.filter(pk=self._run.pk).first()
            if run is None:  # it was deleted
                _forget(self._run)
            elif run.stored_step is not None and run.status in _DONE:
                _forget(run)
        except STORE_OUTAGE as error:
            log.warning("a training's states were not removed: %r", error)
