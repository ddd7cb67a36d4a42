"""Run `python -m worker.train_many` over the jobs of several runs. Does not use the database.

Each run has a thread, which calls `BatchChild.train` as it would call `run_trainer`; the thread
that calls `BatchChild.run` starts the one child and hands its events to theirs.
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

from contract.judging import MOST_S, MOST_WAIT_S
from contract.training import TrainJob
from controlplane.training.last_lines import for_tenant, last_lines
from controlplane.training.trainer import (
    DISK_FULL,
    LOST,
    MAX_ERROR_CHARS,
    MAX_LINE_BYTES,
    NO_ROOM,
    Listener,
    Reader,
    Ticks,
    Told,
    TrainerStopped,
    TrainingAbandoned,
    TrainingFailed,
    TrainingPaused,
    check_end,
    parse_event,
    stop_child,
    tell_again,
)

log = logging.getLogger(__name__)

#: Longest age of a run's state on the disk.
CHECKPOINT_S = 45.0
#: Time that a paused run may take to write its state.
SAVE_TIMEOUT_S = 20.0
#: Time reserved for a run's scores, beside their passes, before its time limit.
_SLACK_S = 60.0
#: Events of a run that will be trained after the batch.
_AFTER_THE_BATCH = ("alone", "later")
Event = dict[str, Any]
#: Settings of torch's allocator, which grows segments, because memory of a GPU is short.
_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


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
        self._environment = {**_ALLOCATOR, **environment}
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
        self._changed.notify_all()

    def train(
        self,
        job: TrainJob,
        folder: Path,
        listener: Listener,
        reader: Reader = lambda event: None,
        *,
        lock: int,
        tick_s: float,
        timeout_s: float,
    ) -> None:
        """Train a run beside the others; see `run_trainer`.

        lock  a descriptor that the child keeps open
        """
        ticks = Ticks(listener, tick_s=tick_s, timeout_s=timeout_s)
        if job.output_dir.exists():  # complete: the trainer before was lost before it published
            self.leave()
            tell_again(folder, ticks, reader)
            return
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        path = self._give(job, folder, events, lock)
        try:
            self._follow(events, ticks, reader, folder)
        except TrainingPaused:
            if self._order("pause", path):
                _await_end(events, reader)
            raise
        except (TrainingAbandoned, TrainingFailed):
            self._order("cancel", path)
            raise
        finally:
            with self._changed:
                self.num_training -= 1
                self._note_change()

    def _give(
        self, job: TrainJob, folder: Path, events: queue.SimpleQueue[Event | None], lock: int
    ) -> str:
        """Have the child train a run: from its start, or beside those that it trains already.

        -> its name there, another one each time that a run comes in the same folder
        """
        with self._changed:
            self._num_given += 1
            path = str(folder / f"job-{self._num_given}.json")
            job.write(Path(path))
            self._events[path] = events
            if self._has_ended:
                events.put(None)
            elif self._child is None:
                self._locks.append(lock)
            else:
                self._send({"add": path, "lock": True}, lock)
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
                    [sys.executable, "-m", "worker.train_many", *options, "-", *paths],
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
            if event.get("event") in _AFTER_THE_BATCH:
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
        if self._returncode in (0, 2):  # every run has reported its end
            return
        told = {"exit_code": self._returncode, "last_lines": last_lines(self._stderr)}
        is_stopped = self._returncode < 0 or self._returncode == 143
        log.log(logging.WARNING if is_stopped else logging.ERROR, "the batch ended", extra=told)

    def _follow(
        self,
        events: queue.SimpleQueue[Event | None],
        ticks: Ticks,
        reader: Reader,
        folder: Path,
    ) -> None:
        """Read a run's events until its adapter is there; raises as `run_trainer` does."""
        told = _Told()
        while not told.is_done:
            try:
                event = events.get(timeout=ticks.tell_if_due(told.progress))
            except queue.Empty:
                continue
            if event is None:
                raise self._ended()
            if event.get("event") == "judging" and not told.is_judged:
                told.is_judged = True  # it is trained, so a missing score is no failure
                ticks.allow_more(MOST_S + MOST_WAIT_S + _SLACK_S)
            reader(event)
            told.note(event)
        told.keep(folder)
        ticks.tell(told.progress)

    def _ended(self) -> Exception:
        """Return the error for a child that ended without a word on a run."""
        if self._num_given == 1:  # also raises
            check_end(self._returncode, {}, self._stderr)
        # Also when it crashed: any of the runs may be the reason, and each is tried again.
        return TrainerStopped(NO_ROOM if self._returncode == DISK_FULL else LOST)


def _await_end(events: queue.SimpleQueue[Event | None], reader: Reader) -> None:
    """Read until the child reports the end of a paused run: its state is written."""
    give_up_at = time.monotonic() + SAVE_TIMEOUT_S
    with contextlib.suppress(queue.Empty):
        while (event := events.get(timeout=max(0.0, give_up_at - time.monotonic()))) is not None:
            if event.get("event") in ("error", "done"):
                return
            reader(event)


class _Told(Told):
    """The child's reports on one run.

    is_done    whether its adapter is there
    is_judged  whether it is trained, and its adapter is scored before it is written
    """

    is_done = is_judged = False

    def note(self, event: Event) -> None:
        """Take an event in. Raises TrainingFailed."""
        if event.get("event") == "error":
            message = str(event.get("message"))
            raise TrainingFailed(
                for_tenant(message, [], max_chars=MAX_ERROR_CHARS),
                code="invalid_job" if event.get("field") else "trainer_failed",
                field=str(event.get("field") or ""),
            )
        super().note(event)
        self.is_done = event.get("event") == "done"
