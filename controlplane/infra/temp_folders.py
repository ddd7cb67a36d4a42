"""Folders for the files of a task, on this machine's disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings

_LOCK = ".lock"


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder, and remove it at the end.

    If the process is killed, the next call with the same prefix removes its folder: the owner holds
    a file lock, which the kernel releases when the process ends.
    """
    settings.WORK_DIR.mkdir(parents=True, exist_ok=True)
    _remove_left(prefix)
    folder, lock = _make(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(prefix: str) -> tuple[Path, int]:
    """Return a new folder, and the descriptor of its lock file: closing it releases the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=settings.WORK_DIR, prefix=prefix))
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # another process removed the folder before it was locked


def _remove_left(prefix: str) -> None:
    for folder in settings.WORK_DIR.glob(f"{prefix}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another process is making or removing it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner is alive
        finally:
            os.close(lock)
