"""A file whose modification time says when a process's main loop last ran, for health checks.

test "$(($(date +%s) - $(stat -c %Y FILE)))" -lt 60
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_INTERVAL_S = 1.0


class AliveFile:
    """A file that `note` touches, at most once a second.

    path  None: nothing is written
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0

    def note(self) -> None:
        """Touch the file. Errors are ignored: a full disk does not end the process."""
        if self._path is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL_S
        with contextlib.suppress(OSError):
            self._path.touch()
