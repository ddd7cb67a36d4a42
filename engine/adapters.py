"""AdapterStore: every registered adapter, from its file to its pages.

    DISK -> LOADING -> HOST -> COPYING -> RESIDENT
      ^        |         ^                    |
      +--------+ failed  +--------------------+ evicted, or back to DISK without its host image

Files are read and pages are filled on loader threads; the step loop only looks whether they are
done (`poll`). Everything else here runs on the thread that steps the engine. An adapter is known
by its digest alone; what a digest means never changes.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.adapter_files import HostAdapter, copy_pages, load_adapter, read_plan
from engine.adapter_tiles import TileMap, place_tiles
from engine.config import ModelConfig
from engine.errors import AdapterError, AdapterUnavailable, OutOfPages, UnknownAdapter
from engine.memory import PagePool, PageUse
from engine.prefix_cache import PrefixCache
from kernels import PageLayout

log = logging.getLogger(__name__)


class AdapterState(enum.Enum):
    DISK = "disk"
    LOADING = "loading"
    HOST = "host"
    COPYING = "copying"
    RESIDENT = "resident"


@dataclass(slots=True, kw_only=True, eq=False)
class _Adapter:
    digest: str
    path: Path
    num_pages: int
    max_rank: int
    state: AdapterState = AdapterState.DISK
    future: Future[Any] | None = None
    host: HostAdapter | None = None
    pages: list[int] | None = None
    tiles: TileMap | None = None
    pins: int = 0  # running requests
    users: int = 0  # accepted requests, running or waiting
    is_unregistered: bool = False
    lacks_room: bool = False
    error: AdapterError | None = None


class AdapterStore:
    """Owns the adapters' files, host images and pages.

    pool, arena  where pages come from, and the tensor [P, page_elems] that they are rows of
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        layout: PageLayout,
        pool: PagePool,
        prefixes: PrefixCache,
        arena: torch.Tensor,
        host_cache_bytes: int,
        loader_threads: int,
    ) -> None:
        self._model, self._layout, self._pool, self._arena = model, layout, pool, arena
        self._prefixes = prefixes
        self._adapters: dict[str, _Adapter] = {}
        self._resident: OrderedDict[str, _Adapter] = OrderedDict()  # least recently used first
        self._host: OrderedDict[str, _Adapter] = OrderedDict()
        self._host_bytes = 0
        self._max_host_bytes = host_cache_bytes
        self._in_flight: set[_Adapter] = set()
        self._max_in_flight = 2 * loader_threads
        self._threads = ThreadPoolExecutor(loader_threads, thread_name_prefix="adapter-loader")

    # Registration

    def register(self, digest: str, path: Path) -> None:
        """Know the adapter at `path` by `digest`; does nothing when it is already known.

        Reads the config and the tensor header, not the tensors. Raises AdapterMismatch when they
        do not fit the base, AdapterUnavailable when they cannot be read, OutOfPages when the
        arena could not hold the adapter even if it held nothing else.
        """
        known = self._adapters.get(digest)
        if known is not None:
            known.is_unregistered = False
            return
        plan = read_plan(path, self._model)
        num_pages = place_tiles(plan, self._model, self._layout).num_pages
        if num_pages >= self._pool.num_pages:
            raise OutOfPages(
                f"the adapter needs {num_pages} pages; the arena has {self._pool.num_pages}"
            )
        self._adapters[digest] = _Adapter(
            digest=digest, path=path, num_pages=num_pages, max_rank=plan.max_rank
        )

    def unregister(self, digest: str) -> None:
        """Forget `digest`: at once for new requests, for accepted ones when they have ended."""
        adapter = self._adapters.get(digest)
        if adapter is not None:
            adapter.is_unregistered = True
            self._forget_if_unused(adapter)

    def check_known(self, digests: Iterable[str]) -> None:
        """Raise UnknownAdapter unless all are registered."""
        for digest in digests:
            adapter = self._adapters.get(digest)
            if adapter is None or adapter.is_unregistered:
                raise UnknownAdapter(f"no adapter {digest[:12]} is registered", param="adapters")

    def add_user(self, digests: Sequence[str]) -> None:
        """Count one accepted request, or raise UnknownAdapter and count nothing."""
        self.check_known(digests)
        for digest in digests:
            self._adapters[digest].users += 1

    def remove_user(self, digests: Sequence[str]) -> None:
        """The request has ended."""
        for digest in digests:
            adapter = self._adapters[digest]
            assert adapter.users > 0
            adapter.users -= 1
            if adapter.users == 0:
                adapter.error = None  # the next request tries again
                adapter.lacks_room = False
            self._forget_if_unused(adapter)

    # What the scheduler asks

    def is_resident(self, digest: str) -> bool:
        return digest in self._resident

    def lacks_room(self, digest: str) -> bool:
        """Whether the adapter is ready in host memory and only pages are missing."""
        return self._adapters[digest].lacks_room

    def error(self, digest: str) -> AdapterError | None:
        """Why the last attempt to load the adapter failed, while requests still wait for it."""
        return self._adapters[digest].error

    def num_pages(self, digest: str) -> int:
        return self._adapters[digest].num_pages

    def pin(self, digest: str) -> None:
        """Keep a resident adapter's pages until `unpin`."""
        self._resident[digest].pins += 1
        self._resident.move_to_end(digest)

    def unpin(self, digest: str) -> None:
        adapter = self._resident[digest]
        assert adapter.pins > 0
        adapter.pins -= 1

    def tiles(self, digest: str) -> TileMap:
        """A resident adapter's tiles, at offsets of the arena."""
        tiles = self._resident[digest].tiles
        assert tiles is not None
        return tiles

    def evict_idle(self, num_pages: int, keep: Collection[str]) -> None:
        """Free what nobody uses until `num_pages` pages can be taken.

        Cached prefixes go first, since a page of them costs the least to have again; then idle
        adapters. Of each the least recently used goes first.

        keep  digests that stay. Frees nothing when even all others would not be enough.
        """
        if self._pool.can_take(num_pages):
            return
        idle = [a for a in self._resident.values() if a.pins == 0 and a.digest not in keep]
        num_idle = self._prefixes.num_idle + sum(a.num_pages for a in idle)
        if self._pool.num_free + num_idle < num_pages:
            return
        self._prefixes.evict(num_pages)
        if self._pool.can_take(num_pages):
            return
        for adapter in idle:
            self._evict(adapter)
            if self._pool.can_take(num_pages):
                return

    # Loading

    def poll(self, wanted: Iterable[str]) -> None:
        """Take what the loader threads have finished and start what is `wanted` and missing.

        wanted  digests that waiting requests need, the most urgent first: a later one never
                evicts an earlier one
        """
        for adapter in [a for a in self._in_flight if a.future is not None and a.future.done()]:
            self._finish_loading(adapter)
        earlier: set[str] = set()
        for digest in wanted:
            if digest in earlier:
                continue
            earlier.add(digest)
            adapter = self._adapters[digest]
            if adapter.state is AdapterState.DISK and adapter.error is None:
                self._start_loading(adapter)
            if adapter.state is AdapterState.HOST:
                self._start_copying(adapter, earlier)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a loader thread finishes something, `timeout_s` at most."""
        futures = [a.future for a in self._in_flight if a.future is not None]
        if futures:
            wait(futures, timeout=timeout_s, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start_loading(self, adapter: _Adapter) -> None:
        if len(self._in_flight) >= self._max_in_flight:
            return
        adapter.state = AdapterState.LOADING
        adapter.future = self._threads.submit(
            load_adapter, adapter.path, self._model, self._layout, self._arena
        )
        self._in_flight.add(adapter)

    def _start_copying(self, adapter: _Adapter, keep: Collection[str]) -> None:
        self.evict_idle(adapter.num_pages, keep)
        adapter.lacks_room = not self._pool.can_take(adapter.num_pages)
        if adapter.lacks_room:
            return
        assert adapter.host is not None
        adapter.pages = self._pool.take(adapter.num_pages, PageUse.ADAPTER)
        adapter.state = AdapterState.COPYING
        adapter.future = self._threads.submit(
            copy_pages, adapter.host.image, self._arena, list(adapter.pages)
        )
        self._in_flight.add(adapter)

    def _finish_loading(self, adapter: _Adapter) -> None:
        self._in_flight.discard(adapter)
        future, adapter.future = adapter.future, None
        assert future is not None
        error = future.exception()
        if error is not None:
            self._fail(adapter, error)
        elif adapter.state is AdapterState.LOADING:
            adapter.host = future.result()
            adapter.state = AdapterState.HOST
            self._keep_host(adapter)
        else:
            assert adapter.host is not None and adapter.pages is not None
            adapter.tiles = adapter.host.tiles.at(adapter.pages, self._layout.page_elems)
            adapter.state = AdapterState.RESIDENT
            self._resident[adapter.digest] = adapter
            self._trim_host()
        self._forget_if_unused(adapter)

    def _fail(self, adapter: _Adapter, error: BaseException) -> None:
        if adapter.pages is not None:
            self._pool.release(adapter.pages)
            adapter.pages = None
        self._drop_host(adapter)
        adapter.state = AdapterState.DISK
        if not isinstance(error, AdapterError):
            wrapped = AdapterUnavailable(f"adapter {adapter.digest[:12]} cannot be loaded: {error}")
            wrapped.__cause__ = error
            error = wrapped
        adapter.error = error
        log.warning("adapter load failed", extra={"digest": adapter.digest, "error": str(error)})

    def _evict(self, adapter: _Adapter) -> None:
        assert adapter.pins == 0 and adapter.pages is not None
        del self._resident[adapter.digest]
        self._pool.release(adapter.pages)
        adapter.pages = adapter.tiles = None
        adapter.state = AdapterState.DISK if adapter.host is None else AdapterState.HOST

    # Host memory

    def _keep_host(self, adapter: _Adapter) -> None:
        assert adapter.host is not None
        self._host[adapter.digest] = adapter
        self._host_bytes += adapter.host.num_bytes
        self._trim_host()

    def _trim_host(self) -> None:
        """Drop host images over the budget, oldest first; one still to be copied stays."""
        for adapter in list(self._host.values()):
            if self._host_bytes <= self._max_host_bytes:
                return
            if adapter.state is AdapterState.RESIDENT or (
                adapter.state is AdapterState.HOST and adapter.users == 0
            ):
                self._drop_host(adapter)
                if adapter.state is AdapterState.HOST:
                    adapter.state = AdapterState.DISK

    def _drop_host(self, adapter: _Adapter) -> None:
        if adapter.host is not None:
            self._host_bytes -= adapter.host.num_bytes
            self._host.pop(adapter.digest, None)
            adapter.host = None

    def _forget_if_unused(self, adapter: _Adapter) -> None:
        if not adapter.is_unregistered or adapter.users or adapter.future is not None:
            return
        if adapter.state is AdapterState.RESIDENT:
            self._evict(adapter)
        self._drop_host(adapter)
        self._adapters.pop(adapter.digest, None)

    # Statistics and integrity

    @property
    def num_registered(self) -> int:
        return sum(not adapter.is_unregistered for adapter in self._adapters.values())

    @property
    def resident_digests(self) -> tuple[str, ...]:
        return tuple(self._resident)

    @property
    def is_loading(self) -> bool:
        return bool(self._in_flight)

    def owned_pages(self) -> list[list[int]]:
        """The pages of every adapter, for `PagePool.check_integrity`."""
        return [a.pages for a in self._adapters.values() if a.pages is not None]

    def check_integrity(self) -> None:
        """Raise AssertionError unless states, pages, pins and host bytes agree."""
        for adapter in self._adapters.values():
            resident = adapter.state is AdapterState.RESIDENT
            assert resident == (adapter.digest in self._resident)
            assert (adapter.pages is not None) == (
                resident or adapter.state is AdapterState.COPYING
            )
            assert (adapter.future is not None) == (adapter in self._in_flight)
            assert adapter.pins == 0 or resident
            assert adapter.pins <= adapter.users
            assert adapter.state is not AdapterState.HOST or adapter.host is not None
            assert not adapter.is_unregistered or adapter.users or adapter.future
        assert self._host_bytes == sum(a.host.num_bytes for a in self._host.values() if a.host)
