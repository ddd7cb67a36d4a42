"""Run `python -m worker.train` as a child process and read its events. Does not use the database.

Only the child imports torch: its crash does not end this process, and a cancellation kills it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contract.training import TrainJob
from controlplane.training.last_lines import for_tenant, last_lines
from controlplane.training.loss_curve import LossCurve

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
#: How long the child may take to end after SIGTERM before it is killed.
STOP_TIMEOUT_S = 10.0
#: The child's exit code for a job or data that are wrong.
_WRONG_JOB = 2
#: Its exit code where no room is left on the disk.
DISK_FULL = 4
#: Why a run is queued again.
LOST, NO_ROOM = "The trainer was lost", "No room is left on the trainer's disk"
#: What the event `started` counts, which every progress event is given, too.
_COUNTS = ("rows", "examples", "truncated_rows", "dropped_rows", "validation_rows", "leaked_rows")
#: What the trainer told of an adapter that is whole, in the run's folder.
_TOLD = "told.json"
#: Of the message of a failure, with the end of its trace.
MAX_ERROR_CHARS = 2000


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
    """Raised when the listener said no and the child was stopped."""


class TrainingPaused(TrainingAbandoned):
    """Raised by a listener whose run is to wait: the child writes its state before it ends."""


class Told:
    """What a trainer has told of one run.

    progress  its newest, with what its other events said that is to be seen beside it
    """

    def __init__(self) -> None:
        self.progress: dict[str, Any] = {}
        self._device = ""
        self._kept: dict[str, Any] = {}
        self._validation = LossCurve()

    def note(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        kind = event.get("event")
        if kind == "alone":
            self._kept["alone"] = str(event.get("reason"))[:500]
            self.progress = dict(self._kept)
        elif kind == "started":
            self._device = str(event.get("device") or "")
            self._kept |= {name: event[name] for name in _COUNTS if name in event}
            for step, loss in event.get("validation_losses") or []:  # before its checkpoint
                self._validation.add(step, loss)
                self._kept["validation_losses"] = list(self._validation.points)
        elif kind == "saved":
            self._kept["saved_step"] = event.get("step")
        elif kind == "progress":
            if event.get("validation_loss") is not None:
                # Kept here: the listener is not shown every event.
                self._validation.add(event["step"], event["validation_loss"])
                self._kept["validation_losses"] = list(self._validation.points)
            own = {name: value for name, value in event.items() if name != "event"}
            self.progress = self._kept | own
        elif kind == "draft_heads":  # after the last step, with the fields of its progress
            own = {name: value for name, value in event.items() if name != "event"}
            self.progress = self._kept | own

    def keep(self, folder: Path) -> None:
        """Write what was told: the run may be lost between its training and its publication."""
        kept = {"progress": self.progress, "device": self._device}
        (folder / _TOLD).write_text(json.dumps(kept))


def tell_again(folder: Path, ticks: Ticks, reader: Reader) -> None:
    """Say what the trainer said that made the adapter in `folder`, before it could be published."""
    try:
        kept = json.loads((folder / _TOLD).read_text())
    except (OSError, ValueError):
        kept = {"progress": {}, "device": ""}
    progress = kept["progress"]
    reader({"event": "started", "resumed_step": progress.get("step"), "device": kept["device"]})
    reader({"event": "done", "trained_tokens": progress.get("trained_tokens")})
    ticks.tell(progress)


#: Gets the newest progress event, or {} before the first; returns whether to continue, or raises
#: TrainingPaused.
Listener = Callable[[dict[str, Any]], bool]
#: Gets every event as it comes.
Reader = Callable[[dict[str, Any]], None]


class Ticks:
    """Tells a listener every `tick_s` how far a training is, until its time is over."""

    def __init__(self, listener: Listener, *, tick_s: float, timeout_s: float) -> None:
        self._listener, self._tick_s = listener, tick_s
        self._next = 0.0
        self._deadline = time.monotonic() + timeout_s

    def allow_more(self, seconds: float) -> None:
        """Move the end of its time."""
        self._deadline += seconds

    def tell_if_due(self, progress: dict[str, Any]) -> float:
        """Tell it, if it is time to. -> the seconds until the next time.

        Raises TrainingAbandoned, and TrainingFailed after the time limit.
        """
        now = time.monotonic()
        if now >= self._next:
            self.tell(progress)
            self._next = now + self._tick_s
        if now >= self._deadline:
            raise TrainingFailed(
                "The training exceeded the time limit. Train fewer steps.", code="time_limit"
            )
        return max(0.0, self._next - now)

    def tell(self, progress: dict[str, Any]) -> None:
        """Tell it now. Raises TrainingAbandoned when it says no."""
        if not self._listener(progress):
            raise TrainingAbandoned


def run_trainer(
    job: TrainJob,
    folder: Path,
    listener: Listener,
    reader: Reader = lambda event: None,
    *,
    environment: Mapping[str, str],
    lock: int,
    tick_s: float,
    timeout_s: float,
) -> None:
    """Train; when this returns, `job.output_dir` exists. Calls `listener` every `tick_s`.

    reader       gets every event of the trainer
    folder       scratch space of this training
    environment  the child's whole environment, without secrets: it reads tenants' data
    lock         a descriptor that the child keeps open
    Raises TrainingFailed, TrainerStopped, or TrainingAbandoned when the listener said no.
    """
    ticks = Ticks(listener, tick_s=tick_s, timeout_s=timeout_s)
    if job.output_dir.exists():  # whole: the trainer before was lost as it was to publish it
        tell_again(folder, ticks, reader)
        return
    job_path, stderr_path = folder / "job.json", folder / "stderr.log"
    job.write(job_path)
    with stderr_path.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "worker.train", str(job_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environment),
            pass_fds=[lock],
        )
    assert child.stdout is not None
    lines = _Lines(child.stdout.fileno())
    try:
        last, told = _listen(lines, ticks, reader)
        check_end(child.wait(), last, stderr_path)
        told.keep(folder)
        ticks.tell(told.progress)
    except TrainingPaused:
        child.terminate()
        _read_rest(lines, reader)
        raise
    except (TrainingAbandoned, TrainingFailed):
        child.kill()  # nobody goes on from its state
        raise
    finally:
        stop_child(child)


def _listen(lines: _Lines, ticks: Ticks, reader: Reader) -> tuple[dict[str, Any], Told]:
    """Read the child's output to its end. -> its last event and all that it told."""
    last: dict[str, Any] = {}
    told = Told()
    while not lines.is_closed:
        for line in lines.read(timeout_s=ticks.tell_if_due(told.progress)):
            last = parse_event(line)
            reader(last)
            told.note(last)
    return last, told


def _read_rest(lines: _Lines, reader: Reader) -> None:
    """Read what a child says until it has ended: of the steps to its last state, too."""
    give_up_at = time.monotonic() + STOP_TIMEOUT_S
    while not lines.is_closed and (left := give_up_at - time.monotonic()) > 0:
        for line in lines.read(timeout_s=left):
            reader(parse_event(line))


class _Lines:
    """Reads lines from a pipe, with a timeout and a limit on their length."""

    def __init__(self, fd: int) -> None:
        self.is_closed = False
        self._fd = fd
        self._rest = b""

    def read(self, *, timeout_s: float) -> list[bytes]:
        """Return the complete lines that have arrived; wait at most `timeout_s`."""
        readable, _, _ = select.select([self._fd], [], [], timeout_s)
        if not readable:
            return []
        data = os.read(self._fd, MAX_LINE_BYTES)
        self.is_closed = not data
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        return lines


def parse_event(line: bytes) -> dict[str, Any]:
    """Return the event that a trainer wrote; {} for a line that is none."""
    try:
        # PostgreSQL's JSON has no NaN, but the loss of a diverged training is NaN.
        event = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        log.warning("the trainer printed a line that is not an event")
        return {}
    return event


def check_end(returncode: int, last: dict[str, Any], stderr_path: Path) -> None:
    """Return if the training succeeded; else raise why it did not."""
    if returncode == 0 and last.get("event") == "done":
        return
    # The message of a wrong job says it all, and may quote a row.
    lines = [] if returncode == _WRONG_JOB else last_lines(stderr_path)
    told = {"exit_code": returncode, "last_lines": lines}
    if returncode == DISK_FULL:
        log.error("the trainer's disk is full", extra=told)
        raise TrainerStopped(NO_ROOM)
    if returncode < 0 or returncode == 143:  # a signal, or a clean exit after SIGTERM
        log.warning("the trainer was ended from outside", extra=told)
        raise TrainerStopped(LOST)
    level = logging.INFO if returncode == _WRONG_JOB else logging.ERROR
    log.log(level, "training failed", extra=told)
    message = f"The trainer ended without a result (exit code {returncode})."
    if last.get("event") == "error":
        message = str(last.get("message"))
    raise TrainingFailed(
        for_tenant(message, lines, max_chars=MAX_ERROR_CHARS),
        code="invalid_job" if returncode == _WRONG_JOB else "trainer_failed",
        field=str(last.get("field", "")),
    )


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """End a trainer that has not ended yet."""
    assert child.stdout is not None
    child.stdout.close()
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
