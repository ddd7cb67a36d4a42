"""Host memory for adapters: one slab of pages like the arena's, so that reading one allocates nothing.

Where a GPU copies from it the slab is pinned, which takes the driver seconds for some gigabytes:
it is done once, at the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.adapter_tiles import TileMap
from engine.memory import PagePool, PageUse


@dataclass(slots=True)
class HostPages:
    """Room for one adapter's image: image page i is row `numbers[i]` of `memory`.

    memory  [*, page_elems]: the slab, or for an adapter larger than that a tensor of its own
    tiles   where the image's tiles lie, at offsets of the image; None: it is not there yet
    """

    memory: torch.Tensor
    numbers: list[int]
    tiles: TileMap | None = None

    def rows(self) -> Iterable[torch.Tensor]:
        """The image's pages in order, each [page_elems]."""
        return (self.memory[number] for number in self.numbers)

    def placed_tiles(self, tiles: TileMap) -> TileMap:
        """`tiles` at offsets of `memory`."""
        return tiles.at(self.numbers, self.memory.shape[1])


class HostMemory:
    """Hands out the slab's pages, `num_bytes` in all; `take` never waits.

    is_pinned  whether a GPU copies from the pages
    """

    def __init__(
        self, *, num_bytes: int, page_elems: int, dtype: torch.dtype, is_pinned: bool
    ) -> None:
        num_pages = num_bytes // (page_elems * dtype.itemsize)
        self._is_pinned = is_pinned and num_bytes > 0
        self._slab = torch.empty(num_pages, page_elems, dtype=dtype, pin_memory=self._is_pinned)
        self._pool = PagePool(num_pages)
        self._num_own = 0

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    def can_take(self, num_pages: int) -> bool:
        """Whether `take` has room; always for an adapter that the whole slab could not hold."""
        return num_pages > self._pool.num_pages or self._pool.can_take(num_pages)

    def take(self, num_pages: int) -> HostPages:
        """Room for `num_pages`; the caller has asked `can_take`.

        More pages than the slab has are allocated, and freed by `release`.
        """
        if num_pages <= self._pool.num_pages:
            return HostPages(self._slab, self._pool.take(num_pages, PageUse.ADAPTER))
        self._num_own += num_pages
        own = torch.empty(
            num_pages, self._slab.shape[1], dtype=self._slab.dtype, pin_memory=self._is_pinned
        )
        return HostPages(own, list(range(num_pages)))

    def release(self, pages: HostPages) -> None:
        """Nobody reads or writes `pages` any more."""
        if pages.memory is self._slab:
            self._pool.release(pages.numbers)
        else:
            self._num_own -= len(pages.numbers)

    def check_integrity(self, owned: Iterable[HostPages]) -> None:
        """Raise AssertionError unless every page has one owner or none."""
        owned = list(owned)
        self._pool.check_integrity(p.numbers for p in owned if p.memory is self._slab)
        assert self._num_own == sum(len(p.numbers) for p in owned if p.memory is not self._slab)
