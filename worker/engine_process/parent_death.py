"""Ends a worker's child processes with their parent."""

from __future__ import annotations

import ctypes
import signal


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even in the middle of a long step."""
    pr_set_pdeathsig = 1
    try:
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: the closed pipe ends it at the next step
        pass
