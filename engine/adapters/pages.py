"""AdapterPages: the arena's pages that adapters have, whole ones and shared ones. No torch here.

The last page of an adapter is seldom full; a small adapter may have no other. So a page is also cut
into eight *sub-pages*. An adapter's last part, its *tail*, takes sub-pages of pages that several
adapters share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.memory.page_pool import PagePool, PageUse

SUB_PAGES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a packed adapter in the arena.

    pages  pages of the arena that hold its first pages, in order
    tail   sub-pages (arena page * SUB_PAGES + sub-page in it) that hold the filled sub-pages of its
           last page; empty: `pages` hold all of it
    """

    pages: list[int]
    tail: list[int]


class AdapterPages:
    """Takes whole pages from the pool for one adapter each, and shared pages for tails.

    A tail lies in two pages at most, so that fewer pages stay almost empty when adapters leave.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._free: dict[int, list[int]] = {}  # shared page -> its free sub-pages
        # Whole pages of idle places; their sub-pages by shared page; pages that have no others.
        self._num_idle_whole = 0
        self._idle_sub_pages: dict[int, int] = {}
        self._idle_shared: set[int] = set()

    def num_needed(self, num_pages: int, tail_sub_pages: int) -> int:
        """Return how many pages `take` would take from the pool."""
        if not tail_sub_pages:
            return num_pages
        return num_pages - 1 + (sum(self._choose(tail_sub_pages).values()) < tail_sub_pages)

    def take(self, num_pages: int, tail_sub_pages: int) -> Place:
        """Take room for a packed adapter; the caller has asked the pool for `num_needed`.

        tail_sub_pages  how many sub-pages of the last page are filled; 0: the page is taken whole
        """
        if not tail_sub_pages:
            return Place(self._pool.take(num_pages, PageUse.ADAPTER), [])
        counts = self._choose(tail_sub_pages)
        rest = tail_sub_pages - sum(counts.values())
        if rest:
            [page] = self._pool.take(1, PageUse.ADAPTER)
            self._free[page] = list(range((page + 1) * SUB_PAGES - 1, page * SUB_PAGES - 1, -1))
            counts[page] = rest
        tail = [self._free[page].pop() for page, count in counts.items() for _ in range(count)]
        self._note_idle_pages(counts)
        return Place(self._pool.take(num_pages - 1, PageUse.ADAPTER), tail)

    def release(self, place: Place) -> None:
        """Free `place`, which nothing reads or writes any more."""
        self._pool.release(place.pages)
        for sub_page in place.tail:
            self._free[sub_page // SUB_PAGES].append(sub_page)
        shared = {sub_page // SUB_PAGES for sub_page in place.tail}
        self._note_idle_pages(shared)
        for page in shared:
            if len(self._free[page]) == SUB_PAGES:
                del self._free[page]
                self._pool.release([page])

    def set_idle(self, place: Place, *, is_idle: bool) -> None:
        """Count a place as idle from now on, or no longer; a place that was just taken is not."""
        sign = 1 if is_idle else -1
        self._num_idle_whole += sign * len(place.pages)
        shared = Counter(sub_page // SUB_PAGES for sub_page in place.tail)
        for page, count in shared.items():
            self._idle_sub_pages[page] = self._idle_sub_pages.get(page, 0) + sign * count
        self._note_idle_pages(shared)

    @property
    def num_idle(self) -> int:
        """Return how many pages come free when all idle places are released."""
        return self._num_idle_whole + len(self._idle_shared)

    def _note_idle_pages(self, shared: Iterable[int]) -> None:
        """Note which of these shared pages hold nothing but idle places."""
        for page in shared:
            idle = self._idle_sub_pages.get(page, 0)
            if not idle:
                self._idle_sub_pages.pop(page, None)
            if idle and idle + len(self._free[page]) == SUB_PAGES:
                self._idle_shared.add(page)
            else:
                self._idle_shared.discard(page)

    def _choose(self, num_sub_pages: int) -> dict[int, int]:
        """Choose shared pages for a tail: page -> how many of its sub-pages.

        It is the page with the least room that is enough. If there is none, it is the one with the
        most room, and another for the rest. What still has no room takes a new page.
        """
        chosen: dict[int, int] = {}
        for _ in range(2):
            rooms = [
                (len(free), page)
                for page, free in self._free.items()
                if free and page not in chosen
            ]
            fitting = [room for room in rooms if room[0] >= num_sub_pages]
            if fitting:
                chosen[min(fitting)[1]] = num_sub_pages
                return chosen
            if chosen or not rooms:
                return chosen
            room, page = max(rooms)
            chosen[page] = room
            num_sub_pages -= room
        return chosen

    def owned(self, places: Iterable[Place | None]) -> list[list[int]]:
        """Return the pages of all `places`, for `PagePool.check_integrity`."""
        return [*(place.pages for place in filter(None, places)), list(self._free)]

    def check_integrity(
        self, places: Iterable[Place | None], idle: Iterable[Place | None] = ()
    ) -> None:
        """Raise AssertionError unless every sub-page of a shared page is free or has one owner.

        idle  those of `places` that count as idle
        """
        sub_pages = Counter(sub_page for free in self._free.values() for sub_page in free)
        for place in filter(None, places):
            sub_pages.update(place.tail)
        wanted = [
            page * SUB_PAGES + sub_page for page in self._free for sub_page in range(SUB_PAGES)
        ]
        assert sub_pages == Counter(wanted), "sub-pages leaked, or owned twice"
        assert all(len(free) < SUB_PAGES for free in self._free.values()), "a shared page is empty"
        num_whole, idle_sub_pages = 0, Counter[int]()
        for place in filter(None, idle):
            num_whole += len(place.pages)
            idle_sub_pages.update(sub_page // SUB_PAGES for sub_page in place.tail)
        assert (num_whole, idle_sub_pages) == (self._num_idle_whole, self._idle_sub_pages)
        emptied = {
            p for p, count in idle_sub_pages.items() if count + len(self._free[p]) == SUB_PAGES
        }
        assert emptied == self._idle_shared
