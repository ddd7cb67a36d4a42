"""The processes of the lanes: forks of one that has imported and collected everything.

To collect takes 12 s of a processor, and as much again where pytest has to compile the tests
first; it is done once. The first process waits, shows what the lanes wrote and has the worst of
their exit statuses. See tests/lanes.py for how they share the tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest


def fork_lanes(config: pytest.Config, folder: Path, number: int) -> int | None:
    """Fork the lanes. Return None in each, at once, and in the first process the worst status.

    The first lane writes where this process writes, the others to `folder`/NUMBER.log.
    """
    assert threading.active_count() == 1, "a fork has one thread alone"
    sys.stdout.flush()
    sys.stderr.flush()
    lanes: dict[int, int] = {}
    # An interrupt waits until `_wait` knows all lanes: it would leave some behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for lane in range(1, number + 1):
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            if lane > 1:
                _write_to(config, _log(folder, lane))
            return None
        lanes[pid] = lane
    # This process ran nothing, and has nothing to say of it.
    config.pluginmanager.unregister(name="terminalreporter")
    worst = _wait(lanes)
    for lane in range(2, number + 1):
        sys.stdout.write(_log(folder, lane).read_text(errors="replace"))
    sys.stdout.flush()
    return worst


def _log(folder: Path, lane: int) -> Path:
    return folder / f"{lane}.log"


def _write_to(config: pytest.Config, log: Path) -> None:
    """Let this process and its children write to `log`, and capture for itself alone."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def _wait(lanes: dict[int, int]) -> int:
    """Wait for the processes; return the worst status. Told to end, end them first."""
    left, worst = dict(lanes), 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while left:
            pid, status = os.wait()
            if pid in left:
                worst = max(worst, _exit_status(left.pop(pid), status))
    except KeyboardInterrupt:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for pid in left:
            with contextlib.suppress(
                ChildProcessError
            ):  # the signal came as it had been waited for
                os.waitpid(pid, 0)
        raise
    return worst


def _exit_status(lane: int, status: int) -> int:
    """What a shell would say of it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        sys.stdout.write(f"lane {lane} was ended by signal {-code}\n")
    return code if code >= 0 else 128 - code
