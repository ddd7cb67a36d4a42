"""AdapterLoader: adapters from disk to host memory, on threads of their own.

`engine.adapters.store` decides what is read. Everything here runs on the thread that steps the
engine, except the reading itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.adapters.files import AdapterReader
from engine.adapters.host_memory import HostMemory, HostPages
from engine.adapters.record import Adapter, AdapterState
from engine.adapters.threads import start_thread
from engine.errors import AdapterUnavailable
from engine.memory.eviction import EvictionCandidate, ReloadCosts
from engine.memory.eviction_index import EvictionIndex
from engine.memory.page_pool import PagePool
from engine.stats import LoadCounts

log = logging.getLogger(__name__)

# Largest number of threads that were given up and still hang; beyond it nothing more is read.
_MAX_HUNG = 16


@dataclass(frozen=True, slots=True)
class _Hung:
    """A thread that was given up. It may write to `room` until it ends, which may be never."""

    path: Path
    future: Future[None]
    room: HostPages


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimits:
    """Limits of loading and of host memory.

    num_threads   adapters read from disk at a time
    max_prefetch  missing adapters of waiting requests that are loaded ahead of them
    timeout_s     a thread that reads for longer is given up
    max_pinned    pages of all pinned adapters together
    """

    num_threads: int
    max_prefetch: int = 16
    timeout_s: float = 60.0
    max_pinned: int = 0


class AdapterLoader:
    """Owns host memory, the reading threads, and the failures.

    pool   the arena's pages, for the number of the step
    clock  time in seconds, for timeouts and retries
    """

    def __init__(
        self,
        *,
        reader: AdapterReader,
        host: HostMemory,
        pool: PagePool,
        costs: ReloadCosts,
        limits: LoadLimits,
        clock: Callable[[], float],
    ) -> None:
        self._reader, self._host, self._pool = reader, host, pool
        self._limits, self._clock = limits, clock
        self._in_host: dict[str, Adapter] = {}  # packed ones
        # Those of them in the slab that are not being copied to the arena.
        self._evictable = EvictionIndex(partial(packed_candidate_of, costs))
        self._loading: set[Adapter] = set()
        self._failed: dict[str, Adapter] = {}  # may not be tried again yet
        self._hung: list[_Hung] = []
        self._to_prefetch: dict[str, Adapter] = {}  # read in this order when nothing else is
        self.counts = LoadCounts()

    # Reading

    def start(self, adapter: Adapter, keep: Collection[str]) -> None:
        """Start reading an adapter, if a thread and room in host memory are free.

        keep  digests that stay in host memory until they are copied to the arena

        An adapter that cannot be read because threads hang fails at once.
        """
        if self._is_out_of_reach(adapter):
            self.note_failure(adapter, AdapterUnavailable("the adapter's disk does not answer"))
            return
        if len(self._loading) >= self._limits.num_threads:
            return
        if self._make_room(adapter.num_pages, keep):
            self._start(adapter)

    def prefetch(self, adapter: Adapter) -> None:
        """Have `start_prefetch` read an adapter that no request needs yet.

        One that is larger than all of host memory stays on disk.
        """
        if adapter.state is AdapterState.DISK and adapter.num_pages <= self._host.num_pages:
            self._to_prefetch[adapter.digest] = adapter
        elif adapter.digest in self._in_host:  # the heartbeat now names it among the newest
            self._in_host[adapter.digest] = self._in_host.pop(adapter.digest)

    def start_prefetch(self, keep: Collection[str]) -> None:
        """Start reading adapters that no request needs yet, leaving one of several threads free.

        keep  as in `start`. Prefetched adapters stay too until they are used: if there is no room
              for all, the later ones remain on disk.
        """
        most = max(self._limits.num_threads - 1, 1)
        if not self._to_prefetch or len(self._loading) >= most:
            return
        kept = {a.digest for a in self._in_host.values() if a.is_prefetched}.union(keep)
        while self._to_prefetch and len(self._loading) < most:
            adapter = self._to_prefetch.pop(next(iter(self._to_prefetch)))
            if adapter.state is not AdapterState.DISK or adapter.error is not None:
                continue  # it was read for a request, or reading it has failed
            if self._is_out_of_reach(adapter) or adapter.num_pages > self._host.num_pages:
                continue
            if not self._make_room(adapter.num_pages, kept):
                return  # thousands may be left: check what can be dropped only once a step
            adapter.is_prefetched = True
            self._start(adapter)

    @property
    def is_prefetching(self) -> bool:
        return bool(self._to_prefetch) or any(adapter.is_prefetched for adapter in self._loading)

    def is_coming(self, adapter: Adapter) -> bool:
        """Return whether the adapter is being read, or waits to be prefetched."""
        return adapter in self._loading or adapter.digest in self._to_prefetch

    def _start(self, adapter: Adapter) -> None:
        adapter.host = self._host.take(adapter.num_pages)
        adapter.state = AdapterState.LOADING
        adapter.loading_since = self._clock()
        adapter.loading = start_thread(
            self._reader.load, adapter.digest, adapter.path, adapter.host
        )
        self._loading.add(adapter)

    def poll(self) -> list[Adapter]:
        """Take in what threads have finished; return the adapters that are no longer read."""
        ended = []
        for adapter in list(self._loading):
            assert adapter.loading is not None
            if adapter.loading.done():
                self._finish(adapter)
                ended.append(adapter)
            elif self._clock() - adapter.loading_since > self._limits.timeout_s:
                self._abandon(adapter)
                ended.append(adapter)
        for hung in [hung for hung in self._hung if hung.future.done()]:
            self._hung.remove(hung)
            self._host.release(hung.room)
        for adapter in [a for a in self._failed.values() if a.retry_at <= self._clock()]:
            del self._failed[adapter.digest]
            adapter.error = None
        return ended

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def futures(self) -> list[Future[None]]:
        """The futures of the threads that read."""
        return [adapter.loading for adapter in self._loading if adapter.loading is not None]

    def _finish(self, adapter: Adapter) -> None:
        self._loading.discard(adapter)
        future, adapter.loading = adapter.loading, None
        assert future is not None
        error = future.exception()
        if error is None and adapter.host is not None:
            error = adapter.note_content(adapter.host.content)
        if error is not None:
            self.note_failure(adapter, error)
        else:
            adapter.read_s = self.counts.add(self._clock() - adapter.loading_since)
            adapter.num_failures, adapter.failure = 0, None
            adapter.state = AdapterState.HOST
            adapter.last_use = self._pool.time
            self._in_host[adapter.digest] = adapter
            self.let_go(adapter)

    def _abandon(self, adapter: Adapter) -> None:
        """Stop waiting for a thread, which keeps its host pages until it ends."""
        assert adapter.loading is not None and adapter.host is not None
        self._hung.append(_Hung(adapter.path, adapter.loading, adapter.host))
        self._host.give_up(adapter.host)
        self._loading.discard(adapter)
        adapter.loading = adapter.host = None
        self.note_failure(
            adapter, AdapterUnavailable(f"reading took more than {self._limits.timeout_s:g} s")
        )

    def _is_out_of_reach(self, adapter: Adapter) -> bool:
        """Return whether reading it would probably make one more thread hang."""
        return len(self._hung) >= _MAX_HUNG or any(h.path == adapter.path for h in self._hung)

    # Failures

    @property
    def has_failures(self) -> bool:
        """Return whether any adapter has failed and may not be tried again yet."""
        return bool(self._failed)

    def note_failure(self, adapter: Adapter, error: BaseException) -> None:
        """Note that reading or copying an adapter has failed; it is tried again after a pause."""
        self.counts.failures += 1
        self.drop(adapter)
        adapter.state = AdapterState.DISK
        adapter.note_failure(error, self._clock())
        self._failed[adapter.digest] = adapter
        log.warning("adapter load failed", extra={"digest": adapter.digest, "error": str(error)})

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that is no longer registered."""
        self.drop(adapter)
        self._failed.pop(adapter.digest, None)
        self._to_prefetch.pop(adapter.digest, None)

    # Host memory

    @property
    def host_digests(self) -> tuple[str, ...]:
        """The adapters in host memory, the newest last."""
        return tuple(self._in_host)

    def hold(self, adapter: Adapter) -> None:
        """Keep a packed adapter while it is copied to the arena, until `let_go`."""
        if adapter in self._evictable:
            self._evictable.remove(adapter)

    def let_go(self, adapter: Adapter) -> None:
        """Let a packed adapter be dropped as soon as others need its room."""
        assert adapter.host is not None
        if not adapter.host.is_own:
            self._evictable.add(adapter)

    def drop(self, adapter: Adapter) -> None:
        """Give up an adapter's room in host memory, if it has any."""
        if adapter.host is not None:
            self.hold(adapter)
            self._host.release(adapter.host)
            self._in_host.pop(adapter.digest, None)
            adapter.host = None
        adapter.is_prefetched = False

    def _make_room(self, num_pages: int, keep: Collection[str]) -> bool:
        """Drop packed adapters until `num_pages` can be taken: first those that the arena has too.

        Keeps those that are being copied to the arena, those of `keep` that are yet to be copied,
        and those outside the slab. If the others are not enough, drops nothing and returns False.
        """
        if self._host.can_take(num_pages):
            return True
        in_host = (self._in_host[digest] for digest in keep if digest in self._in_host)
        kept = {a for a in in_host if a in self._evictable and a.state is AdapterState.HOST}
        num_evictable = self._evictable.num_pages - sum(adapter.num_pages for adapter in kept)
        if self._host.num_free + num_evictable < num_pages:
            return False
        passed_over = []
        while not self._host.can_take(num_pages):
            first = self._evictable.first(self._pool.time)
            assert first is not None, "less came free than was counted"
            adapter = first.owner
            if adapter in kept:
                self._evictable.remove(adapter)
                passed_over.append(adapter)
                continue
            self.drop(adapter)
            if adapter.state is AdapterState.HOST:
                adapter.state = AdapterState.DISK
                adapter.lacks_room = False
        for adapter in passed_over:
            self._evictable.add(adapter)
        return True

    def check_integrity(self, adapters: Iterable[Adapter]) -> None:
        """Raise AssertionError unless states, host memory and failures of all adapters agree."""
        rooms = [hung.room for hung in self._hung]
        for adapter in adapters:
            assert (adapter.error is not None) == (adapter.digest in self._failed)
            assert (adapter.state is AdapterState.LOADING) == (adapter in self._loading)
            is_whole = adapter.host is not None and adapter.state is not AdapterState.LOADING
            assert is_whole == (adapter.digest in self._in_host)
            is_evictable = is_whole and adapter.arrival is None
            if adapter.host is not None:
                rooms.append(adapter.host)
                is_evictable = is_evictable and not adapter.host.is_own
            assert is_evictable == (adapter in self._evictable)
            assert self._to_prefetch.get(adapter.digest, adapter) is adapter
        self._host.check_integrity(rooms)
        self._evictable.check_integrity()


def packed_candidate_of(costs: ReloadCosts, adapter: Adapter) -> EvictionCandidate[Adapter]:
    """Make the candidate of a packed adapter; if the arena has it too, it costs no reload."""
    is_copy = adapter.state is AdapterState.RESIDENT
    reload_s = 0.0 if is_copy else costs.adapter(adapter.num_pages, is_in_host=False)
    return EvictionCandidate(adapter, adapter.num_pages, reload_s, adapter.last_use)
