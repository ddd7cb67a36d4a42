"""Jobs that come while others are trained."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from worker.training.jobs import NamedJob

#: Seconds that `wait` waits at most, so that a signal is noticed soon.
_WAIT_S = 0.2


class MoreJobs(Protocol):
    """A source of further jobs, which a batch asks between two micro-batches."""

    @property
    def may_come(self) -> bool:
        """Return whether there are more jobs, or may be later."""

    def take(self) -> list[NamedJob]:
        """Those that have come; does not wait."""

    def wait(self) -> None:
        """Wait a moment for one."""


class NoMoreJobs:
    """There are none but those that were there in the beginning."""

    may_come = False

    def take(self) -> list[NamedJob]:
        return []

    def wait(self) -> None:
        """Do nothing."""


class Arrivals:
    """Names of jobs in the order in which they came; one thread puts them in, another takes them.

    is_open  whether more may come, until `end`
    """

    def __init__(self, names: Iterable[str], *, is_open: bool) -> None:
        self._changed = threading.Condition()
        self._names = deque(names)
        self._is_open = is_open

    def put(self, name: str) -> None:
        with self._changed:
            self._names.append(name)
            self._changed.notify_all()

    def end(self) -> None:
        """Note that no more will come."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    @property
    def may_come(self) -> bool:
        with self._changed:
            return self._is_open or bool(self._names)

    def take(self) -> list[str]:
        with self._changed:
            taken = list(self._names)
            self._names.clear()
            return taken

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._names or not self._is_open, timeout=_WAIT_S)
