"""The interface of trainers, and the events that they tell. Does not use the database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from contract.training.job import TrainJob
from controlplane.training.last_lines import for_tenant

#: Why a run is queued again.
LOST, NO_ROOM = "The trainer was lost", "No room is left on the trainer's disk"
#: What the event `started` counts, which every progress event is given, too.
_COUNTS = ("rows", "examples", "truncated_rows", "dropped_rows", "validation_rows", "leaked_rows")
#: What the trainer told of an adapter that is whole, in the run's folder.
_TOLD = "told.json"
#: Length of a failure's message, with the end of its trace.
MAX_ERROR_CHARS = 2000
#: Number of points of a loss curve at which every second one is dropped.
MAX_CURVE_POINTS = 256
Event = dict[str, Any]


class TrainingFailed(Exception):
    """Raised when the training ended without an adapter; the message is for its owner.

    code, field  what kind of failure, and the field of the job that is wrong, where that is known
    """

    def __init__(self, message: str, *, code: str = "training_failed", field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class TrainerStopped(Exception):
    """Raised when something of this machine ended the trainer; the message is for the run's owner.

    Retry it: a shutdown, the kernel out of memory, a full disk.
    """


class TrainingAbandoned(Exception):
    """Raised when the run is no longer this trainer's, or its owner has cancelled it."""


class TrainingPaused(TrainingAbandoned):
    """Raised when the run's owner has paused it: its state is written before the trainer ends."""


class LossCurve:
    """[step, loss] in the order of the steps, with a bounded number of points."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step, unless the step is not after the last one."""
        if self.points and step <= self.points[-1][0]:
            return
        if len(self.points) >= MAX_CURVE_POINTS:
            self.points = self.points[::2]
        self.points.append([step, loss])


class TrainedRun(Protocol):
    """A run as a trainer sees it: the trainer passes events on, and asks whether to continue.

    folder   scratch space of this run
    lock     a descriptor that whoever uses the folder keeps open
    is_done  whether its adapter is there
    """

    folder: Path
    lock: int

    @property
    def is_done(self) -> bool: ...

    def note(self, event: Event) -> None:
        """Take in an event of the trainer. Raises TrainingFailed."""

    def tick(self) -> float:
        """Report the progress if that is due. -> the seconds until the next time.

        Raises TrainingAbandoned, TrainingPaused, and TrainingFailed after the time limit.
        """


class Trainer(Protocol):
    """Trains one run.

    num_training  runs that share its device now
    """

    @property
    def num_training(self) -> int: ...

    def train(self, job: TrainJob, run: TrainedRun) -> None:
        """Train; when this returns, the run is done.

        Raises TrainerStopped, and what the run raises.
        """


class Told:
    """The events that a trainer has told of one run.

    progress    its newest, with what its other events said that is to be seen beside it
    saved_step  the step of the newest state on the disk
    is_done     whether its adapter is there
    is_judged   whether it is trained, and its adapter is scored before it is written
    """

    def __init__(self) -> None:
        self.progress: Event = {}
        self.saved_step = 0
        self.is_done = self.is_judged = False
        self._device = ""
        self._kept: Event = {}
        self._validation = LossCurve()

    def note(self, event: Event) -> None:
        """Take an event in. Raises TrainingFailed."""
        kind = event.get("event")
        if kind == "error":
            message = str(event.get("message"))
            raise TrainingFailed(
                for_tenant(message, [], max_chars=MAX_ERROR_CHARS),
                code="invalid_job" if event.get("field") else "trainer_failed",
                field=str(event.get("field") or ""),
            )
        self.is_done |= kind == "done"
        self.is_judged |= kind == "judging"
        if kind == "started":
            self._device = str(event.get("device") or "")
            self._kept |= {name: event[name] for name in _COUNTS if name in event}
            for step, loss in event.get("validation_losses") or []:  # before its checkpoint
                self._validation.add(step, loss)
                self._kept["validation_losses"] = list(self._validation.points)
        elif kind == "saved":
            self.saved_step = self._kept["saved_step"] = event["step"]
        elif kind == "progress":
            if event.get("validation_loss") is not None:
                # Kept here: the platform is not shown every event.
                self._validation.add(event["step"], event["validation_loss"])
                self._kept["validation_losses"] = list(self._validation.points)
            self.progress = self._kept | _fields(event)
        elif kind == "draft_heads":  # after the last step, with the fields of its progress
            self.progress = self._kept | _fields(event)

    def keep(self, folder: Path) -> None:
        """Write what was told: the run may be lost between its training and its publication."""
        kept = {"progress": self.progress, "device": self._device}
        (folder / _TOLD).write_text(json.dumps(kept))

    def told_before(self, folder: Path) -> list[Event]:
        """Return what the trainer said that made the adapter in `folder`, as its last events.

        The progress is that of then.
        """
        try:
            kept = json.loads((folder / _TOLD).read_text())
        except (OSError, ValueError):
            kept = {"progress": {}, "device": ""}
        self.progress = kept["progress"]
        step, tokens = (self.progress.get(name) for name in ("step", "trained_tokens"))
        return [
            {"event": "started", "resumed_step": step, "device": kept["device"]},
            {"event": "done", "trained_tokens": tokens},
        ]


def _fields(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "event"}
