"""HostMemory: host memory for packed adapters, one slab of pages that is allocated at the start.

If a GPU copies from the slab it is pinned, which takes the driver seconds for some gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from engine.adapters.tiles import TileMap
from engine.memory.page_pool import PagePool, PageUse


@dataclass(slots=True)
class HostPages:
    """Room for one packed adapter: its page i is row `numbers[i]` of `open()`.

    is_own       whether the room is outside the slab, for this adapter alone
    is_given_up  whether a hung thread has it, which may never release it
    content      hash of the files that it was packed from
    tiles        where its tiles lie, at offsets of the packed adapter; None: it is not packed yet
    """

    numbers: list[int]
    is_own: bool
    allocate: Callable[[], torch.Tensor]
    is_given_up: bool = False
    memory: torch.Tensor | None = None
    tiles: TileMap | None = None
    content: str = ""

    def open(self) -> torch.Tensor:
        """Return the memory [*, page_elems]; the first call allocates room outside the slab."""
        if self.memory is None:
            self.memory = self.allocate()
        return self.memory

    def rows(self) -> Iterable[torch.Tensor]:
        """Return the packed adapter's pages in order, each [page_elems]."""
        memory = self.open()
        return (memory[number] for number in self.numbers)


class HostMemory:
    """Hands out the pages of a slab of `num_bytes`; `take` never waits.

    arena  [P, page_elems], to which packed adapters are copied
    """

    def __init__(self, arena: torch.Tensor, num_bytes: int) -> None:
        self._page_elems, self._dtype = arena.shape[1], arena.dtype
        self._is_pinned = arena.is_cuda
        self._pool = PagePool(num_bytes // (self._page_elems * self._dtype.itemsize))
        self._slab = self._empty(self._pool.num_pages)
        self._num_given_up = 0

    @property
    def num_pages(self) -> int:
        """Pages of the slab, without those that were given up."""
        return self._pool.num_pages - self._num_given_up

    @property
    def num_free(self) -> int:
        """Free pages of the slab."""
        return self._pool.num_free

    def can_take(self, num_pages: int) -> bool:
        """Return whether `take` has room; always true for an adapter larger than the slab."""
        return num_pages > self.num_pages or self._pool.can_take(num_pages)

    def take(self, num_pages: int) -> HostPages:
        """Take room for `num_pages`; the caller has asked `can_take`."""
        if num_pages <= self.num_pages:
            numbers = self._pool.take(num_pages, PageUse.ADAPTER)
            return HostPages(numbers, is_own=False, allocate=lambda: self._slab)
        return HostPages(
            list(range(num_pages)), is_own=True, allocate=lambda: self._empty(num_pages)
        )

    def release(self, pages: HostPages) -> None:
        """Return `pages`, which nothing reads or writes any more."""
        if not pages.is_own:
            self._pool.release(pages.numbers)
            if pages.is_given_up:
                self._num_given_up -= len(pages.numbers)

    def give_up(self, pages: HostPages) -> None:
        """Stop counting `pages` as part of the slab, until `release`."""
        pages.is_given_up = True
        if not pages.is_own:
            self._num_given_up += len(pages.numbers)

    def _empty(self, num_pages: int) -> torch.Tensor:
        return torch.empty(
            num_pages, self._page_elems, dtype=self._dtype, pin_memory=self._is_pinned
        )

    def check_integrity(self, owned: Iterable[HostPages]) -> None:
        """Raise AssertionError unless every page of the slab has one owner or none."""
        taken = [pages for pages in owned if not pages.is_own]
        self._pool.check_integrity(pages.numbers for pages in taken)
        given_up = sum(len(pages.numbers) for pages in taken if pages.is_given_up)
        assert given_up == self._num_given_up
