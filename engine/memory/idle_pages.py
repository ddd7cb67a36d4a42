"""IdlePages: frees idle prefixes and idle adapters in one order. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from engine.memory.eviction import EvictionCandidate, ReloadCosts, eviction_order
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PrefixCache

T = TypeVar("T")


class IdlePages(Generic[T]):
    """The arena's idle pages: the prefix cache's, and those of adapters of type T."""

    def __init__(self, pool: PagePool, prefixes: PrefixCache, costs: ReloadCosts) -> None:
        self._pool, self._prefixes, self._costs = pool, prefixes, costs

    def free(
        self,
        num_pages: int,
        use: PageUse,
        first: Callable[[], EvictionCandidate[T] | None],
        num_adapter: int,
        evict: Callable[[T], None],
    ) -> None:
        """Free pages until `num_pages` can be taken for `use`; free none if all are not enough.

        first        returns the idle adapter that goes first; None: none is left
        num_adapter  pages that all idle adapters hold
        evict        frees an adapter's pages

        If only the limit of `use` is exceeded, frees pages of that use alone.
        """
        own, free = self._pool.missing(num_pages, use)
        if own == free == 0:
            return
        num_idle = {PageUse.KV: self._prefixes.num_idle, PageUse.ADAPTER: num_adapter}
        if own > num_idle[use] or free > sum(num_idle.values()):
            return
        while (missing := self._pool.missing(num_pages, use)) != (0, 0):
            kinds = (use,) if missing[0] else (PageUse.KV, PageUse.ADAPTER)
            oldest = self._prefixes.oldest_use if PageUse.KV in kinds else None
            adapter = first() if PageUse.ADAPTER in kinds else None
            if oldest is not None and self._goes_first(oldest, adapter):
                self._prefixes.evict_oldest()
            else:
                assert adapter is not None, "less came free than was counted"
                evict(adapter.owner)

    def _goes_first(self, oldest_use: int, adapter: EvictionCandidate[T] | None) -> bool:
        """Return whether a prefix page with this last use goes before the adapter."""
        if adapter is None:
            return True
        page = EvictionCandidate(None, 1, self._costs.prefix, oldest_use)
        choices: tuple[EvictionCandidate[T | None], ...] = (page, adapter)
        return eviction_order(choices, self._pool.time)[0] is page
