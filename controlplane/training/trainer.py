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

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 1024
#: How long the child may take to end after SIGTERM before it is killed.
STOP_TIMEOUT_S = 10.0
#: The child's exit code for a job or data that are wrong.
_WRONG_JOB = 2
#: Of the message of a failure, with the end of its trace.
MAX_ERROR_CHARS = 2000


class TrainingFailed(Exception):
    """Raised when the training ended without an adapter; the message is for its owner."""


class TrainerStopped(Exception):
    """Raised when a shutdown, or the kernel out of memory, ended the trainer. Retry it."""


class TrainingAbandoned(Exception):
    """Raised when the listener said no and the child was stopped."""


#: Gets the newest progress event, or {} before the first; returns whether to continue.
Listener = Callable[[dict[str, Any]], bool]


def run_trainer(
    job: TrainJob,
    folder: Path,
    listener: Listener,
    *,
    environment: Mapping[str, str],
    tick_s: float,
    timeout_s: float,
) -> None:
    """Train; when this returns, `job.output_dir` exists. Calls `listener` every `tick_s`.

    folder       scratch space of this training
    environment  the child's whole environment, without secrets: it reads tenants' data
    Raises TrainingFailed, TrainerStopped, or TrainingAbandoned when the listener said no.
    """
    job_path, stderr_path = folder / "job.json", folder / "stderr.log"
    job.write(job_path)
    with stderr_path.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "worker.train", str(job_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=dict(environment),
        )
    try:
        deadline = time.monotonic() + timeout_s
        last, progress = _listen(child, listener, tick_s=tick_s, deadline=deadline)
        _check(child.wait(), last, stderr_path)
        if not listener(progress):
            raise TrainingAbandoned
    finally:
        _stop(child)


def _listen(
    child: subprocess.Popen[bytes], listener: Listener, *, tick_s: float, deadline: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the child's output to its end. -> its last event and its last progress."""
    assert child.stdout is not None
    lines = _Lines(child.stdout.fileno())
    last: dict[str, Any] = {}
    progress: dict[str, Any] = {}
    next_tick = 0.0
    while not lines.is_closed:
        now = time.monotonic()
        if now >= next_tick:
            if not listener(progress):
                raise TrainingAbandoned
            next_tick = now + tick_s
        if now >= deadline:
            raise TrainingFailed("The training exceeded the time limit. Train fewer steps.")
        for line in lines.read(timeout_s=next_tick - now):
            last = _event(line)
            if last.get("event") == "progress":
                progress = {name: value for name, value in last.items() if name != "event"}
    return last, progress


class _Lines:
    """Reads lines from a pipe, with a timeout and a limit on their length."""

    def __init__(self, fd: int) -> None:
        self.is_closed = False
        self._fd = fd
        self._rest = b""

    def read(self, *, timeout_s: float) -> list[bytes]:
        """Return the complete lines that have arrived; wait at most `timeout_s`."""
        readable, _, _ = select.select([self._fd], [], [], max(0.0, timeout_s))
        if not readable:
            return []
        data = os.read(self._fd, MAX_LINE_BYTES)
        self.is_closed = not data
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        return lines


def _event(line: bytes) -> dict[str, Any]:
    try:
        # PostgreSQL's JSON has no NaN, but the loss of a diverged training is NaN.
        event = json.loads(line, parse_constant=lambda _: None)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        log.warning("the trainer printed a line that is not an event")
        return {}
    return event


def _check(returncode: int, last: dict[str, Any], stderr_path: Path) -> None:
    """Return if the training succeeded; else raise why it did not."""
    if returncode == 0 and last.get("event") == "done":
        return
    # The message of a wrong job says it all, and may quote a row.
    lines = [] if returncode == _WRONG_JOB else last_lines(stderr_path)
    told = {"exit_code": returncode, "last_lines": lines}
    if returncode < 0 or returncode == 143:  # a signal, or a clean exit after SIGTERM
        log.warning("the trainer was ended from outside", extra=told)
        raise TrainerStopped(f"the trainer was ended from outside ({returncode})")
    level = logging.INFO if returncode == _WRONG_JOB else logging.ERROR
    log.log(level, "training failed", extra=told)
    message = f"The trainer ended without a result (exit code {returncode})."
    if last.get("event") == "error":
        message = str(last.get("message"))
    raise TrainingFailed(for_tenant(message, lines, max_chars=MAX_ERROR_CHARS))


def _stop(child: subprocess.Popen[bytes]) -> None:
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
