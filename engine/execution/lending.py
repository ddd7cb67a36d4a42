"""Lending: the memory and weights of a serving engine that a trainer in its thread may use."""

from __future__ import annotations

import torch

from engine.adapters.store import AdapterStore
from engine.execution.runner import ModelRunner
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler


class Lending:
    """Owns the pages that are lent; during the loan they are neither KV nor adapters.

    weights  those that the engine runs, one copy; None: `EngineConfig.lends_weights` is not set
    pages    the lent ones, one after the other
    trained_s  seconds of the device that went into training; the borrower's count
    """

    def __init__(
        self,
        pool: PagePool,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        adapters: AdapterStore,
        runner: ModelRunner,
    ) -> None:
        self._pool, self._prefixes, self._scheduler = pool, prefixes, scheduler
        self._adapters = adapters
        self._arena, self.weights = runner.arena, runner.weights
        self.pages = range(0)
        self.trained_s = 0.0

    @property
    def page_bytes(self) -> int:
        return self._arena.shape[1] * self._arena.itemsize

    @property
    def num_obtainable(self) -> int:
        """Pages that are free, or hold nothing but prefixes that nobody reads."""
        return self._pool.num_free + self._prefixes.num_idle

    @property
    def awaits_first_token(self) -> bool:
        """Return whether a request has not got its first token yet."""
        scheduler = self._scheduler
        return bool(scheduler.waiting) or any(
            sequence.num_generated == 0 or sequence.num_uncomputed > 1
            for sequence in scheduler.running
        )

    @property
    def may_get_first_token(self) -> bool:
        """Return whether one of these waits for nothing but steps: for no adapter, no grammar."""
        return any(sequence.num_generated == 0 for sequence in self._scheduler.running) or any(
            not sequence.is_waiting_for_grammar
            and all(map(self._adapters.is_resident, sequence.digests))
            for sequence in self._scheduler.waiting
        )

    @property
    def is_short(self) -> bool:
        """Return whether a request found too few pages while some were lent."""
        return bool(self.pages) and self._pool.is_short

    def lend(self, num_pages: int) -> torch.Tensor | None:
        """Return the memory [bytes] uint8 of up to `num_pages` pages that lie one after the other.

        They are free ones, and those of prefixes that nobody reads, which are forgotten; None:
        there are none, or some are lent already.
        """
        found = self._longest(num_pages)
        if self.pages or not found:
            return None
        for page in found:
            if self._prefixes.is_idle(page):
                self._prefixes.evict_page(page)
        self._pool.take_these(found, PageUse.LENT)
        self._pool.is_short = False
        self.pages = found
        return self._memory()

    def take_back(self) -> None:
        """End the loan: the pages' content is lost, and the borrower must not read it any more."""
        # Kernels read whole pages and mask the part without tokens, which must contain numbers.
        self._memory().zero_()
        self._pool.release(self.pages)
        self.pages = range(0)

    def _memory(self) -> torch.Tensor:
        return self._arena[self.pages.start : self.pages.stop].view(torch.uint8).flatten()

    def _longest(self, most: int) -> range:
        """Return the last `most` of the longest row of pages that can be had."""
        longest, start = range(0), 0
        for page in range(self._pool.num_pages + 1):
            if page == self._pool.num_pages or not self._can_be_had(page):
                if page - start > len(longest):
                    longest = range(start, page)
                start = page + 1
        return longest[-most:] if most > 0 else range(0)

    def _can_be_had(self, page: int) -> bool:
        return self._pool.num_references(page) == 0 or self._prefixes.is_idle(page)
