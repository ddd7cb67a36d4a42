"""A file whose time says when a process last went round: for a container's health check.

test "$(($(date +%s) - $(stat -c %Y FILE)))" -lt 60
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_INTERVAL_S = 1.0


class AliveFile:
    """Touched by `note`, once a second at most.

    path  None: nothing is written
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0

    def note(self) -> None:
        """Say that this process lives. A full disk does not end it."""
        if self._path is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL_S
        with contextlib.suppress(OSError):
            self._path.touch()
