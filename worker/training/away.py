"""AwayTraining: jobs trained by a serving worker that holds their base already.

It makes a `worker.training.loop.BatchTraining` each time that the worker has room. In between the
jobs wait; each resumes from its last checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contract.adapters.base_model import find_base_model
from engine.model.config import ModelConfig
from engine.training.memory import elements_of
from worker.child import Stopped
from worker.training.arrivals import MoreJobs, NoMoreJobs
from worker.training.base import load_codec
from worker.training.disk import CheckpointFolder
from worker.training.jobs import NamedJob, settings_of
from worker.training.loop import BatchTraining, Emit
from worker.training.remote import RemoteTrainer, TrainerBusy, TrainerGone

#: Pause before the worker is asked again.
_AGAIN_S = 2.0
#: So often the worker may be lost, which had not wanted its memory back, before this gives up.
_MOST_LOST = 3


class AwayTraining:
    """Trains jobs of one base at the worker whose socket is `path`.

    failures  jobs that ended with an error of their own
    """

    def __init__(
        self, path: Path, base: Path, folder: CheckpointFolder, emit: Emit, checkpoint_s: float
    ) -> None:
        self._path, self._base, self._folder = path, base, folder
        self._emit, self._checkpoint_s = emit, checkpoint_s
        self._left: dict[str, NamedJob] = {}
        self._more: MoreJobs = NoMoreJobs()
        self._cancelled: dict[str, bool] = {}  # whether its state is kept
        self._begun: set[str] = set()
        self._batch: BatchTraining | None = None
        self._device = ""
        self._is_stopped = self._has_told = False
        self._woken = threading.Event()
        self.failures = 0

    def run(self, jobs: Iterable[NamedJob], more: MoreJobs | None = None) -> None:
        """Train all jobs to their ends, however often the worker has to be waited for.

        Jobs that come in that time join those that are trained; the worker is not kept for them.
        Raises Stopped after `stop`, TrainerRefuses if the worker cannot train them, TrainerGone if
        it was lost again and again.
        """
        self._left = {named.name: named for named in jobs}
        self._more = more or NoMoreJobs()
        codec, lost = load_codec(self._base), 0
        while self._left or self._more.may_come:
            self.take()
            trainer = self._open()
            if trainer is None:
                continue
            batch = BatchTraining(trainer, codec, self._folder, self._tell, self._checkpoint_s)
            trainer.on_wanted_back = batch.stop
            self._device, self._batch = trainer.device, batch
            for name, pause in list(self._cancelled.items()):
                batch.cancel(name, pause=pause)
            try:
                batch.run(list(self._left.values()), self)
            except Stopped:
                if self._is_stopped:
                    raise
            except TrainerGone:
                lost += not batch.is_stopped
                if lost >= _MOST_LOST:
                    raise
            finally:
                self._batch = None
                self.failures += batch.failures
                trainer.close()
            self._say_written()

    #: The worker's room is given back once nothing is trained in it.
    may_come = False

    def take(self) -> list[NamedJob]:
        """Jobs that have come: they are trained in this session of the worker or in a later one."""
        taken = self._more.take()
        self._left |= {named.name: named for named in taken}
        return taken

    def wait(self) -> None:
        """Do nothing: a session is not kept for jobs that may come."""

    def stop(self) -> None:
        """Let `run` end soon."""
        self._is_stopped = True
        self._woken.set()
        if self._batch is not None:
            self._batch.stop()

    def cancel(self, name: str, *, pause: bool = False) -> None:
        """Let a job end; other threads may call it."""
        self._cancelled[name] = pause
        self._woken.set()
        if self._batch is not None:
            self._batch.cancel(name, pause=pause)

    def _open(self) -> RemoteTrainer | None:
        """Ask the worker for room; None: ask again. Raises Stopped, TrainerRefuses."""
        if self._is_stopped:
            raise Stopped
        for name in [name for name in self._cancelled if name in self._left]:
            self.failures += 1
            self._tell(name, "error", message="it was cancelled")
            if not self._cancelled[name]:
                self._folder.drop(name)
        if not self._left:
            self._more.wait()
            return None
        config = ModelConfig.from_folder(self._base)
        sizes = [
            elements_of(config, settings_of(named.job.hyperparameters))
            for named in self._left.values()
        ]
        if self._more.may_come:
            sizes.append(max(sizes))  # so that one that joins has room
        revision = find_base_model(self._base).revision
        try:
            return RemoteTrainer.open(self._path, revision=revision, sizes=sizes)
        except TrainerBusy as error:
            if not self._has_told:
                self._has_told = True
                for name in self._left:
                    self._tell(name, "warning", message=f"it waits for a serving worker: {error}")
        self._woken.wait(_AGAIN_S)
        self._woken.clear()
        return None

    def _say_written(self) -> None:
        """Report jobs whose adapters were written when the worker was lost."""
        for name in list(self._left):
            result = self._folder.load_result(name)
            if result is not None and Path(result["output"]).exists():
                self._tell(name, "done", **result)
                self._folder.drop(name)

    def _tell(self, name: str, event: str, **fields: Any) -> None:
        """Pass an event on; each job begins once, and on the worker's device."""
        if event == "started":
            if name in self._begun:
                return
            self._begun.add(name)
            fields["device"] = self._device
        elif event in ("done", "error"):
            self._left.pop(name, None)
        self._emit(name, event, **fields)
