"""IdleAdapters: the adapters in the arena that no running request uses. No torch here."""

from __future__ import annotations

from functools import partial

from engine.adapters.pages import AdapterPages
from engine.adapters.record import Adapter
from engine.memory.eviction import EvictionCandidate, ReloadCosts
from engine.memory.eviction_index import EvictionIndex


class IdleAdapters:
    """Knows which idle adapter to evict first; tells `pages` which places are idle."""

    def __init__(self, pages: AdapterPages, costs: ReloadCosts) -> None:
        self._pages = pages
        # When host memory drops a packed adapter, its retention value here rises.
        self._index = EvictionIndex(partial(candidate_of, costs))

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._index

    def add(self, adapter: Adapter) -> None:
        """Add an adapter that no running request uses any more."""
        assert adapter.place is not None
        self._pages.set_idle(adapter.place, is_idle=True)
        self._index.add(adapter)

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter that a request uses again, or that leaves the arena."""
        assert adapter.place is not None
        self._pages.set_idle(adapter.place, is_idle=False)
        self._index.remove(adapter)

    def first(self, now: int) -> EvictionCandidate[Adapter] | None:
        """Return the adapter to evict first; None when none is idle."""
        return self._index.first(now)

    def check_integrity(self, idle: set[Adapter]) -> None:
        """Raise AssertionError unless exactly `idle` are here, in the right order."""
        assert idle == set(self._index), "an adapter is idle and used, or neither"
        self._index.check_integrity()


def candidate_of(costs: ReloadCosts, adapter: Adapter) -> EvictionCandidate[Adapter]:
    """Make the candidate of an adapter's pages in the arena."""
    reload_s = costs.adapter(adapter.num_pages, is_in_host=adapter.host is not None)
    return EvictionCandidate(adapter, adapter.num_pages, reload_s, adapter.last_use)
