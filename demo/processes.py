"""A child process with a log and a pid file; a later run can stop it if this one is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from demo.errors import StepFailed

LOG_TAIL_LINES = 25
STOP_TIMEOUT_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, its user, and how to stop it.

    env   None: this process's environment
    user  the account to run as; only root may ask
    umask  of the files it makes; -1: this process's
    """

    argv: Sequence[str]
    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    user: str | None = None
    umask: int = -1
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = STOP_TIMEOUT_S


class ChildProcess:
    """One program started by us: `start`, `wait_until`, `stop`.

    Its output goes to `log`. `pid_file` holds its pid and start time, by which a later run finds
    and stops it if this one is killed.
    """

    def __init__(self, name: str, command: Command, *, log: Path, pid_file: Path) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.pid_file = pid_file
        self.started_at: float | None = None  # Unix seconds, of the last start
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen else None

    @property
    def returncode(self) -> int | None:
        """The exit status after it has ended, else None."""
        return self._popen.poll() if self._popen else None

    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start the program; stop a process that an earlier run left first."""
        stop_leftover(self.pid_file)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started_at = time.time()
        with self.log.open("ab") as log:
            try:
                # Its own session: Ctrl-C in the terminal must reach only this process, which then
                # stops all others in order.
                self._popen = subprocess.Popen(
                    self.command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.command.env,
                    cwd=self.command.cwd,
                    start_new_session=True,
                    umask=self.command.umask,
                    **_as_user(self.command.user),
                )
            except OSError as error:
                raise StepFailed(
                    f"{self.name} could not be started: {error}",
                    advice="run `make setup` again; the program comes with a Python package",
                ) from error
        write_pid_file(
            self.pid_file,
            self._popen.pid,
            stop_signal=self.command.stop_signal,
            stop_timeout_s=self.command.stop_timeout_s,
        )

    def wait_until(
        self, is_ready: Callable[[], bool], *, timeout_s: float, step_s: float = 0.05
    ) -> None:
        """Wait until `is_ready()`. Raises StepFailed when it ends first or takes too long."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            if not self.is_running():
                raise self.failure(
                    f"{self.name} ended with status {self.returncode} while starting"
                )
            if is_ready():
                return
            if time.monotonic() > give_up_at:
                raise self.failure(f"{self.name} did not answer within {timeout_s:.0f} s")
            time.sleep(step_s)

    def failure(self, what: str) -> StepFailed:
        return StepFailed(
            what,
            details=log_tail(self.log),
            advice=f"the whole log is {self.log}; fix what it names, then try again",
        )

    def ask_to_stop(self) -> None:
        """Send it the stop signal, and return at once."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.send_signal(self.command.stop_signal)

    def stop(self) -> None:
        """Stop it; kill it if that takes too long. Does nothing when it has already ended."""
        if self._popen is not None and self._popen.poll() is None:
            self.ask_to_stop()
            try:
                self._popen.wait(self.command.stop_timeout_s)
            except subprocess.TimeoutExpired:
                kill_tree(self._popen.pid)
                self._popen.wait()
        self.pid_file.unlink(missing_ok=True)


def _as_user(user: str | None) -> dict[str, Any]:
    if user is None:
        return {}
    account = pwd.getpwnam(user)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log; empty when there is none."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def write_pid_file(
    path: Path,
    pid: int,
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> None:
    """Record a process by pid and start time: another process may get the same pid later."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return
    record = {
        "pid": pid,
        "started": started,
        "stop_signal": int(stop_signal),
        "stop_timeout_s": stop_timeout_s,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps(record))
    os.replace(staging, path)


def recorded_process(path: Path) -> psutil.Process | None:
    """Return the process of a pid file if it still runs, else None."""
    record = _read_record(path)
    try:
        process = psutil.Process(record["pid"])
        # A zombie has ended; its parent has not read its status yet.
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process if abs(process.create_time() - record["started"]) < 1.0 else None
    except (KeyError, TypeError, psutil.Error):
        return None


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def stop_leftover(pid_file: Path) -> bool:
    """Stop the process of a pid file that an earlier run left. -> whether there was one."""
    process = recorded_process(pid_file)
    if process is not None:
        record = _read_record(pid_file)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(record.get("stop_signal", signal.SIGTERM))
        _, alive = psutil.wait_procs([process], record.get("stop_timeout_s", STOP_TIMEOUT_S))
        for survivor in alive:
            kill_tree(survivor.pid)
        psutil.wait_procs(alive, timeout=5)
    pid_file.unlink(missing_ok=True)
    return process is not None


def kill_tree(pid: int) -> None:
    """SIGKILL a process and its descendants."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # Not the first: if it is our child, its Popen must reap it to get its status.
    psutil.wait_procs(family[1:], timeout=5)
