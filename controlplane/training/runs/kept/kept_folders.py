"""A run's folder on this machine's disk, which outlives its trainer for the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingRun

_LOCK = ".lock"
#: Time that a child whose parent was killed may take to save its runs and exit.
WAIT_S = 2.0
_RETRY_S = 0.1
_ID_CHARS = 36
#: A run's folder, or that of one of its attempts.
_RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(\.\d+)?$")


@dataclass(frozen=True, slots=True)
class KeptFolder:
    """A locked folder; processes with the descriptor `lock` open, children too, own it."""

    path: Path
    lock: int


def _root() -> Path:
    return Path(settings.WORK_DIR) / "runs"


@contextlib.contextmanager
def kept_folder(run_id: uuid.UUID, attempt: int) -> Iterator[KeptFolder]:
    """Yield the run's folder, as its last trainer on this machine left it.

    If a shared child still has it, the folder is an empty one of this attempt.
    """
    path = _root() / str(run_id)
    lock = _opened(path)
    give_up_at = time.monotonic() + WAIT_S
    while not _is_locked(lock):
        if time.monotonic() >= give_up_at:
            os.close(lock)
            path = _root() / f"{run_id}.{attempt}"
            lock = _opened(path)
            give_up_at += WAIT_S
        time.sleep(_RETRY_S)
    try:
        yield KeptFolder(path, lock)
    finally:
        os.close(lock)


def _opened(path: Path) -> int:
    """Make a folder if it does not exist. -> a descriptor of its lock's file."""
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def folders_sweep() -> None:
    """Remove the folders of runs that have ended, here or elsewhere."""
    paths = [path for path in _root().glob("*") if _RUN.match(path.name)]
    ids = {path.name[:_ID_CHARS] for path in paths}
    with all_tenants(reason="the folders are of all tenants' runs"):
        going = TrainingRun.objects.filter(pk__in=ids, status__in=TrainingRun.ACTIVE)
        left = ids - {str(pk) for pk in going.values_list("pk", flat=True)}
    for path in paths:
        if path.name[:_ID_CHARS] in left:
            shutil.rmtree(path, ignore_errors=True)
