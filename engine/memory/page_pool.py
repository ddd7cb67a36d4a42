"""PagePool: who owns which page of the arena. No torch here.

The arena (docs/memory.md) is cut into equal pages. A page holds KV of one or more requests, or
parts of adapters. The pool knows pages by number only, not what they hold.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable


class PageUse(enum.IntEnum):
    """The content of a page, for budgets and statistics."""

    FREE = 0
    KV = 1
    ADAPTER = 2
    LENT = 3


class PagePool:
    """Hands out pages and counts references to them.

    `can_take` changes nothing. A page is free again when it was released as often as it was taken
    and shared.

    max_kv, max_adapter  the most pages of each use; None: all. The rest is always left to the
                         other use.
    time                 steps so far; owners note the last use of a page by it
    is_short             somebody found too few pages since it was last set to False
    """

    def __init__(
        self, num_pages: int, *, max_kv: int | None = None, max_adapter: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self.time = 0
        self.is_short = False
        self._max_used = [
            num_pages if most is None else min(most, num_pages)
            for most in (None, max_kv, max_adapter, None)
        ]
        # Popped from the end, so that low numbers go first and runs of pages come out in order.
        self._free = array("i", range(num_pages - 1, -1, -1))
        self._refs = array("i", bytes(4 * num_pages))
        self._use = array("b", bytes(num_pages))
        self._num_used = [0] * len(PageUse)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_used(self, use: PageUse) -> int:
        return self._num_used[use]

    def num_references(self, page: int) -> int:
        return self._refs[page]

    def max_used(self, use: PageUse) -> int:
        """Return the most pages that `use` may have."""
        return self._max_used[use]

    def missing(self, num_pages: int, use: PageUse) -> tuple[int, int]:
        """Return the pages to free before `num_pages` can be taken: (of `use` itself, of any)."""
        over = self._num_used[use] + num_pages - self._max_used[use]
        return max(over, 0), max(num_pages - len(self._free), 0)

    def can_take(self, num_pages: int, use: PageUse = PageUse.KV) -> bool:
        """Return whether this number of pages is free and within the limit of `use`."""
        return self.missing(num_pages, use) == (0, 0)

    def take(self, num_pages: int, use: PageUse) -> list[int]:
        """Take `num_pages` pages, with one reference each; the caller has asked `can_take`."""
        assert self.can_take(num_pages, use), f"{num_pages} pages wanted, {self.num_free} free"
        if num_pages == 0:
            return []
        pages = self._free[: -num_pages - 1 : -1].tolist()
        del self._free[-num_pages:]
        for page in pages:
            self._refs[page] = 1
            self._use[page] = use
        self._num_used[use] += num_pages
        return pages

    def take_these(self, pages: range, use: PageUse) -> None:
        """Take the given pages, which must all be free; slower than `take`."""
        assert all(self._refs[page] == 0 for page in pages), "a page is taken"
        self._free = array("i", (page for page in self._free if page not in pages))
        for page in pages:
            self._refs[page] = 1
            self._use[page] = use
        self._num_used[use] += len(pages)

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
        for use in (PageUse.KV, PageUse.ADAPTER, PageUse.LENT):
            assert self._num_used[use] == self._use.count(use), f"the count of {use} is wrong"
            assert self._num_used[use] <= self._max_used[use], f"{use} is over its limit"
        if owned is not None:
            counts = array("i", bytes(4 * self.num_pages))
            for pages in owned:
                for page in pages:
                    counts[page] += 1
            assert counts == self._refs, "pages leaked, or owned without a reference"
