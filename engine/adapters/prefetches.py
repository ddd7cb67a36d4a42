"""Prefetches: loads adapters into the arena before requests need them, and pins them. No torch.

A prefetch never takes anything from a request: it starts when no waiting request misses an adapter,
and makes room only of what is idle. A pinned adapter is not idle, so nothing evicts it, with one
exception: if a request could not run at all beside the pinned ones, they are let go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from engine.adapters.idle import IdleAdapters
from engine.adapters.loader import AdapterLoader
from engine.adapters.record import Adapter, AdapterState
from engine.memory.pin_choice import choose_pins

log = logging.getLogger(__name__)


class Prefetches:
    """Owns the prefetches to the arena, and which adapters are pinned there.

    adapters  the registered ones, by digest
    max_pages of all pinned adapters together
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        loader: AdapterLoader,
        idle: IdleAdapters,
        max_pages: int,
    ) -> None:
        self._adapters, self._loader, self._idle = adapters, loader, idle
        self._max_pages = max_pages
        self._to_arena: dict[str, Adapter] = {}
        self._pinned: dict[str, Adapter] = {}

    def __bool__(self) -> bool:
        """Return whether any adapter is on its way to the arena."""
        return bool(self._to_arena)

    @property
    def pinned_digests(self) -> tuple[str, ...]:
        return tuple(self._pinned)

    def add(self, adapter: Adapter, *, to_arena: bool) -> None:
        """Have an adapter read into host memory, and then copied to the arena if there is room."""
        self._loader.prefetch(adapter)
        if to_arena and adapter.place is None:
            self._to_arena[adapter.digest] = adapter

    def pin(self, wanted: Sequence[tuple[str, str]]) -> None:
        """Pin these adapters, as (tenant, digest), and no others.

        If they need too many pages, `choose_pins` chooses. Digests that are not registered are
        passed over.
        """
        known = [pair for pair in wanted if pair[1] in self._adapters]
        num_pages = {digest: self._adapters[digest].num_pages for _, digest in known}
        chosen = choose_pins(known, num_pages, self._max_pages)
        for adapter in [a for a in self._pinned.values() if a.digest not in chosen]:
            self.unpin(adapter)
        for digest in chosen:
            adapter = self._adapters[digest]
            if adapter.is_unregistered:
                continue
            if not adapter.is_pinned:
                self._pinned[digest], adapter.is_pinned = adapter, True
                if adapter in self._idle:
                    self._idle.remove(adapter)
            self.add(adapter, to_arena=True)

    def unpin(self, adapter: Adapter) -> None:
        """Let others have the adapter's room again; do nothing if it is not pinned."""
        if self._pinned.pop(adapter.digest, None) is not None:
            adapter.is_pinned = False
            if adapter.state is AdapterState.RESIDENT and adapter.is_idle:
                self._idle.add(adapter)

    def let_pinned_go(self) -> bool:
        """Unpin all adapters; return whether any was pinned in the arena."""
        pinned = list(self._pinned.values())
        for adapter in pinned:
            self.unpin(adapter)
        if pinned:
            log.warning("pinned adapters are let go for a request that needs their room")
        return any(adapter.place is not None for adapter in pinned)

    def forget(self, adapter: Adapter) -> None:
        """Forget an adapter that is no longer registered."""
        self._to_arena.pop(adapter.digest, None)
        self.unpin(adapter)

    def poll(self, keep: Collection[str], copy: Callable[[Adapter, Collection[str]], None]) -> None:
        """Start the copies of adapters that have been read. Those without room stay where they are.

        keep  digests that stay in the arena
        copy  starts an adapter's copy to the arena if there is room: (adapter, digests that stay);
              given here, since who keeps its owner's method keeps the owner
        """
        for digest, adapter in list(self._to_arena.items()):
            if adapter.state is AdapterState.HOST:
                was_prefetched, adapter.is_prefetched = adapter.is_prefetched, False
                copy(adapter, keep)
                if adapter.lacks_room:
                    adapter.lacks_room, adapter.is_prefetched = False, was_prefetched
                    del self._to_arena[digest]
            elif adapter.state is AdapterState.RESIDENT:
                del self._to_arena[digest]
            elif adapter.state is AdapterState.DISK and not self._loader.is_coming(adapter):
                del self._to_arena[digest]  # it failed, or host memory has no room

    def check_integrity(self) -> None:
        """Raise AssertionError unless pins and limits agree."""
        pinned = {a for a in self._adapters.values() if a.is_pinned}
        assert pinned == set(self._pinned.values())
        assert sum(adapter.num_pages for adapter in pinned) <= self._max_pages
        assert not any(adapter.is_unregistered for adapter in pinned)
        assert all(self._adapters[digest] is a for digest, a in self._to_arena.items())
