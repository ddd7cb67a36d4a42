"""Run one piece of work on a stranger's bytes in a sealed child process.

The child is `python -m MODULE`, which calls `contract.process.sealed_process.serve`;
docs/security.md says what holds it. Here it is started without secrets, watched, and killed past
its limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from contract.process.sealed_process import OUT_OF_MEMORY

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parent.parent.parent
_POLL_S = 0.01
#: Time that a child may take to exit after its answer.
_END_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a child.

    memory_bytes  that it may use besides its program
    cpu_s         of CPU time
    wall_s        in all; only an overloaded machine reaches it
    answer_bytes  of its answer
    """

    memory_bytes: int
    cpu_s: int
    wall_s: float
    answer_bytes: int


class OverBounds(Exception):
    """Raised when the work exceeds a bound; the message says which: "it …"."""


class Lost(Exception):
    """Raised when the child was not started, ended from outside, or got no time. Try again."""


class Broken(Exception):
    """Raised when the child crashed or failed: the bytes found a defect of ours."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The answer of a child, and its cost.

    walls  the walls around it, as `contract.process.sealed_process` names them
    """

    answer: dict[str, Any]
    walls: tuple[str, ...]
    peak_bytes: int
    cpu_s: float


def run_sealed(
    module: str,
    work: Mapping[str, Any],
    files: Sequence[BinaryIO],
    *,
    environment: Mapping[str, str],
    bounds: Bounds,
) -> Ended:
    """Run `python -m module` on a description of work and open files. -> its answer.

    environment  the child's whole environment, without secrets
    Raises OverBounds, Lost, Broken. The answer is a stranger's: check its form.
    """
    descriptors = [file.fileno() for file in files]
    # -S -P: nothing beside this program and the standard library is imported.
    command = [sys.executable, "-S", "-P", "-m", module]
    command += map(str, (bounds.memory_bytes, bounds.cpu_s, *descriptors))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=descriptors,
            start_new_session=True,
        )
    except OSError as error:  # no memory, or too many processes
        raise Lost(f"it could not be started: {error.strerror}") from error
    deadline = time.monotonic() + bounds.wall_s
    try:
        text = _converse(child, json.dumps(work).encode(), bounds.answer_bytes, deadline)
        status, cpu_s = _reap(child, _END_S)
    finally:
        _kill(child)
    return _judge(text, status, cpu_s, bounds)


def _converse(
    child: subprocess.Popen[bytes], work: bytes, most: int, deadline: float
) -> bytes | None:
    """Give the child its work and read its answer. -> None after the deadline."""
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(work)  # it reads this before anything else
    text = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        if not select.select([child.stdout], [], [], left)[0]:
            continue
        piece = os.read(child.stdout.fileno(), 1 << 16)
        text += piece
        if not piece or len(text) > most:
            return bytes(text[: most + 1])


def _reap(child: subprocess.Popen[bytes], patience_s: float) -> tuple[int | None, float]:
    """Return the exit code, None if it does not end, and the CPU seconds that it took."""
    deadline = time.monotonic() + patience_s
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode, usage.ru_utime + usage.ru_stime
        if time.monotonic() >= deadline:
            return None, 0.0
        time.sleep(_POLL_S)


def _kill(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    child.stdout.close()
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _judge(text: bytes | None, status: int | None, cpu_s: float, bounds: Bounds) -> Ended:
    if text is None:
        raise Lost(f"it got too little time within {bounds.wall_s:g} s")
    if len(text) > bounds.answer_bytes:
        raise Broken("its answer is too long")
    if status == OUT_OF_MEMORY:
        raise OverBounds(f"it needs more than {bounds.memory_bytes >> 20} MB of memory")
    # Python may die of a lack of memory or time without a word of its own.
    if status == -signal.SIGXCPU or (status is not None and status < 0 and cpu_s >= bounds.cpu_s):
        raise OverBounds(f"it takes more than {bounds.cpu_s} s of CPU time")
    if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        raise Lost(f"it was killed from outside ({status})")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if status != 0 or not isinstance(told, dict) or not isinstance(told.get("answer"), dict):
        where = told.get("failed") if isinstance(told, dict) else None
        raise Broken(f"it ended with {status}: {str(where or 'no answer')[:300]}")
    walls = tuple(wall for wall in ("limits", "seccomp") if wall in (told.get("walls") or ()))
    peak = told.get("peak_bytes")
    peak_bytes = peak if type(peak) is int else 0
    return Ended(answer=told["answer"], walls=walls, peak_bytes=peak_bytes, cpu_s=cpu_s)
