"""Adapter: the store's record of one adapter. There may be thousands, so it stays small."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from contract.messages.pooling import Pooling
from engine.adapters.copies import Arrival
from engine.adapters.host_memory import HostPages
from engine.adapters.pages import SUB_PAGES, Place
from engine.adapters.tiles import TileMap
from engine.errors import AdapterDamaged, AdapterError, AdapterUnavailable

# Shortest and longest pause between two attempts to load an adapter, in seconds; doubled with each
# failure in a row.
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

    version          number of the registration, if the same digest may come back with other content
    content          hash of its files when they were first read; None: not read yet
    host, loading    its pages in host memory, and the thread that fills them
    num_pages        pages of the packed adapter
    tail_sub_pages   filled sub-pages of its last page; 0: the whole page
    place, arrival   its pages in the arena, and the copy that fills them
    tiles            its tiles, at offsets of the arena
    pooling, num_labels  what its files say: see `AdapterPlan`; 0: it is no classifier
    pins             running requests that use it
    users            accepted requests that use it, running or waiting
    read_s, copy_s   seconds of its last load to host memory, and from there to the arena
    last_use         number of the engine's step
    lacks_room       whether it is ready in host memory and only pages are missing
    is_prefetched    whether no request has needed it since its prefetch began
    is_pinned        whether it stays in the arena also while no request uses it
    failure          why the last attempt to load it failed; None after one succeeds
    error, retry_at  the same until the next attempt may be made, and the time of that
    """

    digest: str
    path: Path
    num_pages: int
    tail_sub_pages: int = 0
    pooling: Pooling | None = None
    num_labels: int = 0
    version: int = 0
    content: str | None = None
    state: AdapterState = AdapterState.DISK
    loading: Future[None] | None = None
    loading_since: float = 0.0
    copying_since: float = 0.0
    read_s: float = 0.0
    copy_s: float = 0.0
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
    is_pinned: bool = False
    failure: AdapterError | None = None
    error: AdapterError | None = None
    num_failures: int = 0  # in a row
    retry_at: float = 0.0

    @property
    def num_sub_pages(self) -> int:
        """Filled sub-pages of the packed adapter."""
        return self.num_pages * SUB_PAGES - (
            self.tail_sub_pages and SUB_PAGES - self.tail_sub_pages
        )

    @property
    def is_idle(self) -> bool:
        """Return whether nothing holds its pages in the arena."""
        return self.pins == 0 and self.arrival is None and not self.is_pinned

    def note_content(self, content: str) -> AdapterError | None:
        """Note the hash of the files that were read; return an error if it has changed.

        The prefix cache may still hold KV that was computed with the former content.
        """
        if self.content not in (None, content):
            return AdapterDamaged(
                f"the files of adapter {self.digest[:12]} have changed since it was registered: "
                "unregister it and, when its requests have ended, register it again"
            )
        self.content = content
        return None

    def note_failure(self, error: BaseException, now: float) -> None:
        """Return to DISK; requests that need the adapter fail with `error` until `retry_at`."""
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
