"""What the store knows of one adapter. There are thousands of these: they stay small."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.copies import Arrival
from engine.adapters.host_memory import HostPages
from engine.adapters.pages import Place
from engine.adapters.tiles import TileMap
from engine.errors import AdapterDamaged, AdapterError, AdapterUnavailable

# Between two attempts to load an adapter that failed; doubled with each failure in a row.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 60.0


class AdapterState(enum.Enum):
    DISK = "disk"
    LOADING = "loading"
    HOST = "host"
    COPYING = "copying"
    RESIDENT = "resident"


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """One registered adapter; `engine.adapters.store.AdapterStore` changes it.

    version          which registration of the digest this is, where content may differ between them
    content          of its files when they were first read; None: they have not been
    host, loading    its room in host memory, and the thread that fills it
    num_pages        that it has packed
    tail_sub_pages   of the last page that are filled; 0: all of it
    place, arrival   where it lies in the arena, and the copy that fills it
    tiles            where they lie in the arena
    pins, users      requests that run with it; accepted ones, running or waiting
    last_use         in steps of the engine
    lacks_room       it is in host memory, and only pages are missing
    is_prefetched    no request has needed it since it was read, or began to be read
    failure          of the last attempt to load it, until one succeeds
    error, retry_at  the same until another attempt may be made, and when that is
    """

    digest: str
    path: Path
    num_pages: int
    tail_sub_pages: int = 0
    version: int = 0
    content: str | None = None
    state: AdapterState = AdapterState.DISK
    loading: Future[None] | None = None
    loading_since: float = 0.0
    host: HostPages | None = None
    arrival: Arrival | None = None
    place: Place | None = None
    tiles: TileMap | None = None
    last_use: int = 0
    pins: int = 0
    users: int = 0
    is_unregistered: bool = False
    lacks_room: bool = False
    is_prefetched: bool = False
    failure: AdapterError | None = None
    error: AdapterError | None = None
    num_failures: int = 0  # in a row
    retry_at: float = 0.0

    def note_content(self, content: str) -> AdapterError | None:
        """Its files have been read. What is wrong if they hold something else than before: what
        was computed with that may still be found."""
        if self.content not in (None, content):
            return AdapterDamaged(
                f"the files of adapter {self.digest[:12]} have changed since it was registered: "
                "unregister it and, when its requests have ended, register it again"
            )
        self.content = content
        return None

    def note_failure(self, error: BaseException, now: float) -> None:
        """Back to the disk; requests that need the adapter fail with `error` until `retry_at`."""
        if not isinstance(error, AdapterError):
            wrapped = AdapterUnavailable(f"adapter {self.digest[:12]} cannot be loaded: {error}")
            wrapped.__cause__ = error
            error = wrapped
        pause = min(_FIRST_PAUSE_S * 2**self.num_failures, _LAST_PAUSE_S)
        self.num_failures = min(self.num_failures + 1, 16)
        self.state, self.retry_at = AdapterState.DISK, now + pause
        self.error = self.failure = error

    def check_integrity(self) -> None:
        """Raise AssertionError unless the fields agree."""
        is_in_arena = self.state in (AdapterState.COPYING, AdapterState.RESIDENT)
        assert (self.state is AdapterState.LOADING) == (self.loading is not None)
        assert (self.state is AdapterState.COPYING) == (self.arrival is not None)
        assert is_in_arena == (self.place is not None) == (self.tiles is not None)
        assert self.host is not None or self.state in (AdapterState.DISK, AdapterState.RESIDENT)
        assert 0 <= self.pins <= self.users
        assert self.error is None or self.state is AdapterState.DISK
        assert self.error in (None, self.failure)
        assert not self.is_prefetched or self.state in (AdapterState.LOADING, AdapterState.HOST)
        assert (
            not self.is_unregistered
            or self.users
            or self.loading is not None
            or self.arrival is not None
        )
