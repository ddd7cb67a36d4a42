"""PagePool: who owns which page of the arena. No torch here.

The arena (docs/memory.md) is cut into equal pages. A page belongs to the KV of one or more
requests, or to one adapter. The pool knows pages by number only; what they hold is the owner's
business.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable


class PageUse(enum.IntEnum):
    """What a page holds; for budgets and statistics."""

    FREE = 0
    KV = 1
    ADAPTER = 2


class PagePool:
    """Hands out pages and counts references to them.

    `can_take` asks and changes nothing; `take` does it. A page is free again when it was released
    as often as it was taken and shared.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Popped from the end, so that low numbers go first and runs of pages come out in order.
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._refs = array("i", bytes(4 * num_pages))
        self._use = array("b", bytes(num_pages))
        self._num_used = [0, 0, 0]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_used(self, use: PageUse) -> int:
        return self._num_used[use]

    def num_references(self, page: int) -> int:
        return self._refs[page]

    def can_take(self, num_pages: int) -> bool:
        return num_pages <= len(self._free)

    def take(self, num_pages: int, use: PageUse) -> list[int]:
        """`num_pages` pages with one reference each; the caller has asked `can_take`."""
        assert self.can_take(num_pages), f"{num_pages} pages wanted, {self.num_free} free"
        if num_pages == 0:
            return []
        pages = self._free[: -num_pages - 1 : -1].tolist()
        del self._free[-num_pages:]
        for page in pages:
            self._refs[page] = 1
            self._use[page] = use
        self._num_used[use] += num_pages
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is free"
            self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; those without any are free again."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is already free"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._num_used[self._use[page]] -= 1
                self._use[page] = PageUse.FREE
                self._free.append(page)

    def check_integrity(self, owned: Iterable[Iterable[int]] | None = None) -> None:
        """Raise AssertionError unless every page is either free or referenced, never both.

        owned  the pages of every owner; given, the reference counts must be exactly theirs
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        for page in range(self.num_pages):
            is_free = page in free
            assert is_free == (self._refs[page] == 0), f"page {page} is free and referenced"
            assert is_free == (self._use[page] == PageUse.FREE), f"page {page} has a wrong use"
        for use in (PageUse.KV, PageUse.ADAPTER):
            assert self._num_used[use] == self._use.count(use), f"the count of {use} is wrong"
        if owned is not None:
            counts = array("i", bytes(4 * self.num_pages))
            for pages in owned:
                for page in pages:
                    counts[page] += 1
            assert counts == self._refs, "pages leaked, or owned without a reference"
