"""AdapterStore: owns every registered adapter, from its file to its pages.

    DISK -> LOADING -> HOST -> COPYING -> RESIDENT
      ^        |         ^                    |
      +--------+ failed  +--------------------+ evicted, to DISK unless HOST still has it

Files are read on threads and pages are filled beside the steps; the step loop never waits for them
(`poll`). Everything else here runs on the thread that steps the engine. A digest identifies an
adapter; what a digest means never changes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import torch

from contract.messages.pooling import Pooling
from engine.adapters.copies import Arrival, PageCopier
from engine.adapters.files import AdapterReader
from engine.adapters.host_memory import HostMemory
from engine.adapters.idle import IdleAdapters
from engine.adapters.loader import AdapterLoader, LoadLimits
from engine.adapters.pages import SUB_PAGES, AdapterPages
from engine.adapters.prefetches import Prefetches
from engine.adapters.record import Adapter, AdapterState
from engine.adapters.tiles import TileMap
from engine.errors import AdapterError, OutOfPages, UnknownAdapter
from engine.memory.eviction import ReloadCosts
from engine.memory.idle_pages import IdlePages
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PrefixCache
from engine.stats import AdapterStatus, LoadCounts


class AdapterStore:
    """Owns the registered adapters: their files, host memory and pages.

    pool, arena  the pages, and the tensor [P, page_elems] whose rows they are
    host         memory for packed adapters
    clock        time in seconds, for timeouts and retries
    """

    def __init__(
        self,
        *,
        reader: AdapterReader,
        pool: PagePool,
        prefixes: PrefixCache,
        arena: torch.Tensor,
        host: HostMemory,
        costs: ReloadCosts,
        limits: LoadLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._idle_pages: IdlePages[Adapter] = IdlePages(pool, prefixes, costs)
        self._reader, self._copier = reader, PageCopier(arena)
        self._pages, self._page_elems = AdapterPages(pool), arena.shape[1]
        self._sub_page_bytes = self._page_elems * arena.element_size() // SUB_PAGES
        self._idle = IdleAdapters(self._pages, costs)
        self._limits, self._clock = limits, clock
        self._adapters: dict[str, Adapter] = {}
        self._resident: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._arriving: dict[str, Adapter] = {}
        self._num_made = 0
        self._copies = LoadCounts()
        self._loader = AdapterLoader(
            reader=reader, host=host, pool=pool, costs=costs, limits=limits, clock=clock
        )
        self.prefetches = Prefetches(self._adapters, self._loader, self._idle, limits.max_pinned)

    # Registration

    def register(self, digest: str, path: Path) -> None:
        """Register the adapter at `path` as `digest`.

        Reads the config and the tensor header, not the tensors. Does nothing if the digest is
        known, with two exceptions: if the last load failed, the adapter is read from `path` at
        once; if it was unregistered while requests use it, `path` counts when it is read next.
        Raises AdapterMismatch if the files do not fit the base, AdapterUnavailable if they cannot
        be read, OutOfPages if the adapter is larger than the arena.
        """
        known = self._adapters.get(digest)
        if known is not None:
            if known.is_unregistered or known.error is not None:
                known.path = path
            known.is_unregistered = False
            if known.error is not None:
                known.retry_at = self._clock()
            return
        plan = self._reader.read_plan(path)
        tiles = self._reader.place(plan, digest)
        num_pages, tail = tiles.num_pages, tiles.tail_sub_pages
        limit = min(self._pool.max_used(PageUse.ADAPTER), self._pool.num_pages - 1)
        if num_pages > limit:
            raise OutOfPages(f"the adapter needs {num_pages} pages; adapters may have {limit}")
        # Without a rule for digests the same one may come back with other weights.
        self._num_made += not self._reader.verifies
        self._adapters[digest] = Adapter(
            digest=digest,
            path=path,
            num_pages=num_pages,
            tail_sub_pages=tail,
            version=self._num_made,
            pooling=plan.pooling,
            num_labels=0 if plan.classifier is None else plan.classifier.num_labels,
        )

    def prefetch(self, digest: str, *, to_arena: bool = False) -> None:
        """Have a registered adapter read before a request needs it, when no request needs the disk.

        Raises UnknownAdapter.
        """
        self.check_known((digest,))
        self.prefetches.add(self._adapters[digest], to_arena=to_arena)

    def unregister(self, digest: str) -> None:
        """Forget `digest`: at once for new requests; accepted ones may finish with it."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.is_unregistered = True
            self.prefetches.forget(adapter)
            self._release_unused(adapter)

    def check_known(self, digests: Iterable[str]) -> None:
        """Raise UnknownAdapter unless all are registered."""
        for digest in digests:
            adapter = self._adapters.get(digest)
            if adapter is None or adapter.is_unregistered:
                raise UnknownAdapter(f"no adapter {digest[:12]} is registered", param="adapters")

    def num_labels(self, digest: str) -> int:
        """Return how many labels a registered adapter's classifier has; 0: it has none."""
        return self._adapters[digest].num_labels

    def pooling(self, digest: str) -> Pooling | None:
        """Return how a registered adapter pools; None: it does not say."""
        return self._adapters[digest].pooling

    def add_user(self, digests: Sequence[str]) -> None:
        """Count one accepted request as a user; if it raises UnknownAdapter, nothing is counted."""
        self.check_known(digests)
        for digest in digests:
            self._adapters[digest].users += 1
            self._adapters[digest].is_prefetched = False

    def remove_user(self, digests: Sequence[str]) -> None:
        """Stop counting a request that has ended."""
        for digest in digests:
            adapter = self._adapters[digest]
            assert adapter.users > 0
            adapter.users -= 1
            if adapter.users == 0:
                adapter.lacks_room = False
            self._release_unused(adapter)

    # Questions of the scheduler

    def is_resident(self, digest: str) -> bool:
        """Return whether a step may read the adapter; on a GPU its copy may still be running."""
        return digest in self._resident

    def lacks_room(self, digest: str) -> bool:
        """Return whether the adapter is ready in host memory and only pages are missing."""
        return self._adapters[digest].lacks_room

    @property
    def has_failures(self) -> bool:
        """Return whether `error` returns an error for any adapter."""
        return self._loader.has_failures

    def error(self, digest: str) -> AdapterError | None:
        """Return why the last load failed; None once the next attempt may be made."""
        return self._adapters[digest].error

    def versions(self, digests: Iterable[str]) -> tuple[int, ...]:
        """Return each adapter's registration number: equal numbers mean equal content. 0: none."""
        known = map(self._adapters.get, digests)
        return tuple(0 if adapter is None else adapter.version for adapter in known)

    def num_pages(self, digest: str) -> int:
        return self._adapters[digest].num_pages

    def loads_of(self, digests: Iterable[str]) -> list[tuple[int, float]]:
        """Return the bytes and the last load's seconds of the adapters that are still known."""
        known = filter(None, map(self._adapters.get, digests))
        return [(a.num_sub_pages * self._sub_page_bytes, a.read_s + a.copy_s) for a in known]

    def most_pages(self, digests: Iterable[str]) -> int:
        """Return the most pages that registered adapters take together, without others.

        In shared pages that others have left, tails may take a page more for each adapter but two.
        """
        adapters = [self._adapters[digest] for digest in digests]
        num_tails = sum(adapter.tail_sub_pages > 0 for adapter in adapters)
        return sum(adapter.num_pages for adapter in adapters) + max(num_tails - 2, 0)

    def pin(self, digest: str) -> None:
        """Keep a resident adapter's pages until `unpin`."""
        adapter = self._resident[digest]
        if adapter in self._idle:
            self._idle.remove(adapter)
        adapter.pins += 1
        adapter.last_use = self._pool.time
        self._resident.move_to_end(digest)

    def unpin(self, digest: str) -> None:
        adapter = self._resident[digest]
        assert adapter.pins > 0
        adapter.pins -= 1
        adapter.last_use = self._pool.time
        if adapter.is_idle:
            self._idle.add(adapter)

    def tiles(self, digest: str) -> TileMap:
        """Return a resident adapter's tiles, at offsets of the arena."""
        tiles = self._resident[digest].tiles
        assert tiles is not None
        return tiles

    def arrivals(self, digests: Iterable[str]) -> tuple[Arrival, ...]:
        """Return the copies for which a step with these resident adapters has to wait."""
        if not self._arriving:
            return ()
        arriving = (self._arriving[digest] for digest in digests if digest in self._arriving)
        return tuple(adapter.arrival for adapter in arriving if adapter.arrival is not None)

    # Room in the arena

    def evict_idle(self, num_pages: int, keep: Collection[str], use: PageUse = PageUse.KV) -> None:
        """Evict idle adapters and cached prefixes until `num_pages` can be taken for `use`.

        keep  digests that stay. If all others would not be enough, nothing is evicted.
        """
        if self._pool.can_take(num_pages, use):
            return
        resident = map(self._resident.get, keep)
        kept = [a for a in resident if a is not None and a in self._idle]
        for adapter in kept:
            self._idle.remove(adapter)
        self._idle_pages.free(
            num_pages,
            use,
            lambda: self._idle.first(self._pool.time),
            self._pages.num_idle,
            self._evict,
        )
        for adapter in kept:
            self._idle.add(adapter)

    @property
    def host_digests(self) -> tuple[str, ...]:
        """The adapters in host memory, the newest last."""
        return self._loader.host_digests

    def make_room(self, digest: str, keep: Collection[str]) -> bool:
        """Make room for an adapter: evict idle ones not in `keep`. Return whether it fits then."""
        adapter = self._adapters[digest]

        def count() -> int:
            return self._pages.num_needed(adapter.num_pages, adapter.tail_sub_pages)

        before, num_needed = 0, count()
        while before < num_needed and not self._pool.can_take(num_needed, PageUse.ADAPTER):
            self.evict_idle(num_needed, keep, PageUse.ADAPTER)
            # Fewer if evicted tails left room in a shared page; more if that page was freed too.
            before, num_needed = num_needed, count()
        return self._pool.can_take(num_needed, PageUse.ADAPTER)

    def _evict(self, adapter: Adapter) -> None:
        assert adapter.is_idle and adapter.place is not None
        self._idle.remove(adapter)
        del self._resident[adapter.digest]
        self._pages.release(adapter.place)
        adapter.place = adapter.tiles = None
        adapter.state = AdapterState.DISK if adapter.host is None else AdapterState.HOST

    # Loading

    def poll(self, wanted: Iterable[str]) -> None:
        """Begin a step: take in finished reads and copies, and start those that are missing.

        wanted  digests that waiting requests need, the most urgent first: a later one never
                takes room from an earlier one
        """
        self._pool.time += 1
        for adapter in self._loader.poll():
            self._release_unused(adapter)
        for adapter in list(self._arriving.values()):
            self._poll_arrival(adapter)
        seen: set[str] = set()
        num_missing, is_short = 0, False
        for digest in wanted:
            if digest in seen:
                continue
            seen.add(digest)
            if digest in self._resident:
                continue
            adapter = self._adapters[digest]
            if adapter.error is not None:
                continue
            if adapter.state is AdapterState.DISK:
                self._loader.start(adapter, seen)
                is_short = is_short or adapter.state is AdapterState.DISK
            elif adapter.state is AdapterState.HOST:
                self._start_copying(adapter, seen)
            num_missing += 1
            if num_missing == self._limits.max_prefetch:
                return
        if not is_short:
            self._loader.start_prefetch(seen)
        if self.prefetches and not num_missing:
            self.prefetches.poll(seen, self._start_copying)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a thread finishes something, `timeout_s` at most."""
        if futures := self._futures():
            wait(futures, timeout=timeout_s, return_when="FIRST_COMPLETED")
        else:
            time.sleep(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the threads, `timeout_s` at most; threads that still run are left alone."""
        wait(self._futures(), timeout=timeout_s)

    def _futures(self) -> list[Future[None]]:
        """Return the futures of all threads that run."""
        arrivals = [a.arrival.future for a in self._arriving.values() if a.arrival is not None]
        return self._loader.futures + [future for future in arrivals if future is not None]

    def _fail(self, adapter: Adapter, error: BaseException) -> None:
        if adapter.place is not None:
            self._pages.release(adapter.place)
            adapter.place = None
        self._loader.note_failure(adapter, error)

    # From host memory to the arena

    def _start_copying(self, adapter: Adapter, keep: Collection[str]) -> None:
        adapter.lacks_room = not self.make_room(adapter.digest, keep)
        if adapter.lacks_room:
            return
        assert adapter.host is not None and adapter.host.tiles is not None
        place = adapter.place = self._pages.take(adapter.num_pages, adapter.tail_sub_pages)
        adapter.tiles = adapter.host.tiles.at(place.pages, self._page_elems, place.tail)
        adapter.state, adapter.copying_since = AdapterState.COPYING, self._clock()
        self._loader.hold(adapter)
        adapter.arrival = self._copier.start(adapter.host, place)
        self._arriving[adapter.digest] = adapter
        self._poll_arrival(adapter)

    def _poll_arrival(self, adapter: Adapter) -> None:
        assert adapter.arrival is not None
        try:
            is_usable, is_done = adapter.arrival.is_usable, adapter.arrival.is_done
        except Exception as error:
            self._end_arrival(adapter)
            adapter.tiles = None
            self._fail(adapter, error)
            self._release_unused(adapter)
            return
        if is_usable and adapter.digest not in self._resident:
            adapter.last_use = self._pool.time
            self._resident[adapter.digest] = adapter
        if is_done:
            self._end_arrival(adapter)
            adapter.copy_s = self._copies.add(self._clock() - adapter.copying_since)
            adapter.state = AdapterState.RESIDENT
            assert adapter.host is not None
            if adapter.host.is_own:
                self._loader.drop(adapter)
            else:
                self._loader.let_go(adapter)
            if adapter.is_idle:
                self._idle.add(adapter)
            self._release_unused(adapter)

    def _end_arrival(self, adapter: Adapter) -> None:
        del self._arriving[adapter.digest]
        adapter.arrival = None

    def _release_unused(self, adapter: Adapter) -> None:
        """Release unused host memory: that outside the slab; all of it, once unregistered."""
        if adapter.users or adapter.loading or adapter.arrival:
            return
        if adapter.is_unregistered:
            if adapter.state is AdapterState.RESIDENT:
                self._evict(adapter)
            self._loader.forget(adapter)
            self._adapters.pop(adapter.digest, None)
        elif adapter.host is not None and adapter.host.is_own:
            self._loader.drop(adapter)
            adapter.state = AdapterState.DISK

    # Statistics and integrity

    @property
    def num_registered(self) -> int:
        return sum(not adapter.is_unregistered for adapter in self._adapters.values())

    @property
    def load_counts(self) -> dict[str, LoadCounts]:
        """Return the loads so far, by tier; failed copies count among the failures of "host"."""
        tiers = {"host": self._loader.counts, "arena": self._copies}
        return {tier: replace(counts) for tier, counts in tiers.items()}

    @property
    def resident_digests(self) -> tuple[str, ...]:
        return tuple(self._resident)

    @property
    def is_loading(self) -> bool:
        """Return whether any adapter is being read or copied."""
        return self._loader.is_loading or self.is_copying

    @property
    def is_copying(self) -> bool:
        """Return whether any adapter is being copied to the arena; afterwards it may be evicted."""
        return bool(self._arriving)

    @property
    def is_prefetching(self) -> bool:
        """Return whether any adapter is prefetched or waits to be."""
        return self._loader.is_prefetching or bool(self.prefetches)

    def status(self, digest: str) -> AdapterStatus | None:
        """Return where an adapter is; None if it is not registered."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            return None
        if self._loader.is_coming(adapter):
            return AdapterStatus("loading")
        if digest in self._resident:
            return AdapterStatus("resident")
        if adapter.state is AdapterState.DISK:
            return AdapterStatus("disk", adapter.failure)
        return AdapterStatus("host")

    def owned_pages(self) -> list[list[int]]:
        """Return the pages of every adapter, for `PagePool.check_integrity`."""
        return self._pages.owned(adapter.place for adapter in self._adapters.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless states, pages, pins and host memory agree."""
        for adapter in self._adapters.values():
            adapter.check_integrity()
            is_arriving, is_usable = adapter.arrival is not None, adapter.digest in self._resident
            assert is_arriving == (adapter.digest in self._arriving)
            assert is_arriving or is_usable == (adapter.state is AdapterState.RESIDENT)
            assert is_usable or adapter.pins == 0
        idle = {adapter for adapter in self._resident.values() if adapter.is_idle}
        self._idle.check_integrity(idle)
        self.prefetches.check_integrity()
        places = [adapter.place for adapter in self._adapters.values()]
        self._pages.check_integrity(places, [adapter.place for adapter in idle])
        self._loader.check_integrity(self._adapters.values())
