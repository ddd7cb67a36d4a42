"""Helpers of the platform's child processes: standard output, signals, exit codes."""

from __future__ import annotations

import errno
import json
import os
from typing import Any, TextIO

#: The exit code where no room is left on the disk.
DISK_FULL = 4


class Stopped(BaseException):
    """Raised in the main thread by SIGTERM and SIGINT."""


class EventLog:
    """Writes events to the standard output that the process was started with."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"event": event, **fields}, ensure_ascii=False) + "\n")
        self._stream.flush()


def take_stdout() -> TextIO:
    """Return a stream on standard output, and send all other output to standard error."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, says that the disk is full."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # safetensors has the error as text alone.
        if "No space left on device" in str(found):
            return True
        found = found.__cause__ or found.__context__
    return False
