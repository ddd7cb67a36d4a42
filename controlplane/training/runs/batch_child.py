"""Run `python -m worker.train` over the jobs of several runs. Does not use the database.

Each run has a thread, which trains it at a `Place` of the child; the thread that calls
`BatchChild.run` starts the one child and hands its events to theirs. Only the child imports torch:
its crash does not end this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.training.job import TrainJob
from controlplane.training.last_lines import for_tenant, last_lines
from controlplane.training.runs.trainer import (
    LOST,
    MAX_ERROR_CHARS,
    NO_ROOM,
    Event,
    TrainedRun,
    TrainerStopped,
    TrainingAbandoned,
    TrainingFailed,
    TrainingPaused,
)

log = logging.getLogger(__name__)

#: Largest age of a run's state on the disk, in seconds.
CHECKPOINT_S = 30.0
#: Seconds that a run which is paused may take to write its state.
SAVE_TIMEOUT_S = 20.0
#: Seconds that the child may take to end after SIGTERM before it is killed.
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 64 * 1024
#: The child's exit code for jobs or data that are wrong.
_WRONG_JOB = 2
#: Its exit code where no room is left on the disk.
DISK_FULL = 4
#: Settings of torch's allocator, which grows segments, because memory of a GPU is short.
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class BatchChild:
    """One child process for the runs of several threads.

    folder        for its standard error
    num_runs      threads that `train`, or `leave` without it, before the child starts
    worker        the socket of a serving worker that trains them; empty: the child trains
    max_runs      that are here at a time, with those that join; None: none joins
    num_training  threads that `train` now
    """

    def __init__(
        self,
        folder: Path,
        num_runs: int,
        environment: Mapping[str, str],
        worker: str = "",
        max_runs: int | None = None,
    ) -> None:
        self._stderr = folder / "stderr.log"
        self._environment = {**ALLOCATOR, **environment}
        self._worker, self._max_runs = worker, max_runs
        self._missing = num_runs
        self._num_given = 0  # number of runs given to the child
        self.num_training = 0
        self._changed = threading.Condition()
        self._events: dict[str, queue.SimpleQueue[Event | None]] = {}
        self._locks: list[int] = []
        self._dropped: set[str] = set()
        self._child: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._is_closed = max_runs is None  # no run may join any more
        self._is_abandoned = False  # a run ended that the child may still train
        self._is_killed = False  # because nobody waits for it
        self._has_ended = False
        self._returncode = 0

    def expect_another(self, after_s: float) -> bool:
        """Wait for these seconds, and until another run fits; its thread is expected then.

        -> False: no run may join any more, because the others have ended, or one of them waits
        for the end: runs that join do not keep it waiting.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout=after_s)
            self._changed.wait_for(lambda: self._is_closed or self._has_room())
            if self._is_closed:
                return False
            self._missing += 1
            return True

    def _has_room(self) -> bool:
        assert self._max_runs is not None
        return self._child is not None and self._missing + self.num_training < self._max_runs

    def leave(self) -> None:
        """Note that one of the runs will not be trained."""
        with self._changed:
            self._missing -= 1
            self._note_change()

    def close(self) -> None:
        """Let no further run join."""
        with self._changed:
            self._is_closed = True
            self._note_change()

    def _note_change(self) -> None:
        """Let the child end if there is nothing to wait for; called with the lock."""
        is_idle = self._missing + self.num_training == 0
        self._is_closed |= self._child is not None and is_idle
        if self._is_closed and not self._missing and self._max_runs is not None:
            self._send({"last": True})
        if is_idle and self._is_abandoned and self._child is not None:
            self._is_killed = True
            self._child.kill()  # it may be reading rows that nobody waits for
        self._changed.notify_all()

    def place(self) -> Place:
        """Return the place of a run that is expected; its thread trains there, and closes it."""
        return Place(self)

    def train(self, job: TrainJob, run: TrainedRun) -> None:
        """Train a run beside the others: `Trainer` says the rest."""
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        path = self._give(job, run, events)
        try:
            self._follow(events, run)
        except TrainingPaused:
            if self._order("pause", path):
                _await_end(events, run)
            raise
        except (TrainingAbandoned, TrainingFailed):
            self._order("cancel", path)
            self._is_abandoned = True
            raise
        finally:
            with self._changed:
                self.num_training -= 1
                self._note_change()

    def _give(self, job: TrainJob, run: TrainedRun, events: queue.SimpleQueue[Event | None]) -> str:
        """Have the child train a run: from its start, or beside those that it trains already.

        -> its name there, another one each time that a run comes in the same folder
        """
        with self._changed:
            self._num_given += 1
            path = str(run.folder / f"job-{self._num_given}.json")
            job.write(Path(path))
            self._events[path] = events
            if self._has_ended:
                events.put(None)
            elif self._child is None:
                self._locks.append(run.lock)
            else:
                self._send({"add": path, "lock": True}, run.lock)
            self.num_training += 1
            self._missing -= 1
            self._note_change()
            return path

    def run(self) -> None:
        """Start the child once every run is there, and hand out its events until it ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)
        try:
            child = self._start()
            if child is None:
                return
            try:
                self._hand_out(child)
                self._returncode = child.wait()
            finally:
                stop_child(child)
            self._log_end()
        finally:
            with self._changed:
                self._has_ended = self._is_closed = True
                if self._orders is not None:
                    self._orders.close()
                for events in self._events.values():
                    events.put(None)
                self._changed.notify_all()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._changed, self._stderr.open("wb") as stderr:
            paths = [path for path in self._events if path not in self._dropped]
            if not paths:
                return None
            joins = self._max_runs is not None
            options = [
                "--control",
                "--checkpoints=-",
                *(("--join",) if joins else ()),
                "--checkpoint-s",
                str(CHECKPOINT_S),
                "--max-runs",
                str(self._max_runs if joins else len(paths)),
                *(("--worker", self._worker) if self._worker else ()),
            ]
            self._orders, theirs = socket.socketpair()
            with theirs:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "worker.train", *options, *paths],
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=self._environment,
                    pass_fds=self._locks,
                )
            self._note_change()  # all may have ended in between
            return self._child

    def _hand_out(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        while line := child.stdout.readline(MAX_LINE_BYTES):
            event = parse_event(line)
            if event.get("event") == "later":  # it waits until nobody joins the batch any more
                self.close()
            events = self._events.get(str(event.pop("run", "")))
            if events is not None:
                events.put(event)

    def _order(self, order: str, path: str) -> bool:
        """Have the child cancel or pause a run, or skip it. -> whether there is a child."""
        with self._changed:
            self._dropped.add(path)
            self._send({order: path})
            return self._child is not None

    def _send(self, order: dict[str, Any], *locks: int) -> None:
        """Send an order to the child, if there is one, with descriptors; called with the lock."""
        if self._orders is not None:
            with contextlib.suppress(OSError):  # the child has ended
                socket.send_fds(self._orders, [json.dumps(order).encode() + b"\n"], locks)

    def _log_end(self) -> None:
        if self._returncode in (0, _WRONG_JOB) or self._is_killed:  # every run's end is told
            return
        told = {"exit_code": self._returncode, "last_lines": last_lines(self._stderr)}
        is_stopped = self._returncode < 0 or self._returncode == 143
        log.log(logging.WARNING if is_stopped else logging.ERROR, "the batch ended", extra=told)

    def _follow(self, events: queue.SimpleQueue[Event | None], run: TrainedRun) -> None:
        """Pass a run's events on until its adapter is there."""
        while not run.is_done:
            try:
                event = events.get(timeout=run.tick())
            except queue.Empty:
                continue
            if event is None:
                raise self._ended()
            run.note(event)

    def _ended(self) -> Exception:
        """Return the error for a child that ended without a word on a run."""
        if self._num_given == 1:  # also raises
            check_end(self._returncode, self._stderr)
        # Also when it crashed: any of the runs may be the reason, and each is tried again.
        return TrainerStopped(NO_ROOM if self._returncode == DISK_FULL else LOST)


class Place:
    """The place of one run in a child: the `Trainer` of that run. Close it."""

    def __init__(self, child: BatchChild) -> None:
        self._child, self._is_taken = child, False

    @property
    def num_training(self) -> int:
        """Runs that the child trains now."""
        return self._child.num_training

    def train(self, job: TrainJob, run: TrainedRun) -> None:
        """Train the run; `Trainer` says the rest."""
        self._is_taken = True
        self._child.train(job, run)

    def close(self) -> None:
        """Let the child not wait for a run that was not trained after all."""
        if not self._is_taken:
            self._child.leave()


def _await_end(events: queue.SimpleQueue[Event | None], run: TrainedRun) -> None:
    """Read until the child says that a run which is paused has ended: its state is written."""
    give_up_at = time.monotonic() + SAVE_TIMEOUT_S
    with contextlib.suppress(queue.Empty):
        while (event := events.get(timeout=max(0.0, give_up_at - time.monotonic()))) is not None:
            if event.get("event") in ("error", "done"):
                return
            run.note(event)


def parse_event(line: bytes) -> Event:
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


def check_end(returncode: int, stderr_path: Path) -> None:
    """Raise why a child ended that has said nothing of its one run."""
    lines = last_lines(stderr_path)
    told = {"exit_code": returncode, "last_lines": lines}
    if returncode == DISK_FULL:
        log.error("the trainer's disk is full", extra=told)
        raise TrainerStopped(NO_ROOM)
    if returncode < 0 or returncode == 143:  # a signal, or a clean exit after SIGTERM
        log.warning("the trainer was ended from outside", extra=told)
        raise TrainerStopped(LOST)
    log.error("training failed", extra=told)
    message = f"The trainer ended without a result (exit code {returncode})."
    raise TrainingFailed(
        for_tenant(message, lines, max_chars=MAX_ERROR_CHARS), code="trainer_failed"
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
