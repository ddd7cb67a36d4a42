"""PagePool: whatever is taken, shared and released, every page has exactly its owners."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.memory.page_pool import PagePool, PageUse


class Pool(RuleBasedStateMachine):
    NUM_PAGES = 12
    LIMITS: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.NUM_PAGES, **self.LIMITS)
        self.owned: list[tuple[PageUse, list[int]]] = []

    @rule(count=st.integers(0, 14), use=st.sampled_from([PageUse.KV, PageUse.ADAPTER]))
    def take(self, count: int, use: PageUse) -> None:
        own, free = self.pool.missing(count, use)
        if not self.pool.can_take(count, use):
            assert (own, free) != (0, 0)
            over = self.pool.num_used(use) + count - self.pool.max_used(use)
            assert count > self.pool.num_free or over > 0
            return
        assert (own, free) == (0, 0)
        pages = self.pool.take(count, use)
        assert len(set(pages)) == count
        self.owned.append((use, pages))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owned:
            use, pages = data.draw(st.sampled_from(self.owned))
            part = pages[: data.draw(st.integers(0, len(pages)))]
            self.pool.share(part)
            self.owned.append((use, list(part)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            index = data.draw(st.integers(0, len(self.owned) - 1))
            self.pool.release(self.owned.pop(index)[1])

    @invariant()
    def sound(self) -> None:
        self.pool.check_integrity([pages for _, pages in self.owned])
        used = {page for _, pages in self.owned for page in pages}
        assert self.pool.num_free == self.NUM_PAGES - len(used)
        for use in (PageUse.KV, PageUse.ADAPTER):
            pages = {page for kind, pages in self.owned if kind is use for page in pages}
            assert self.pool.num_used(use) == len(pages) <= self.pool.max_used(use)


class LimitedPool(Pool):
    LIMITS: ClassVar[dict[str, int]] = {"max_kv": 9, "max_adapter": 5}


TestPool, TestLimitedPool = Pool.TestCase, LimitedPool.TestCase
TestPool.settings = TestLimitedPool.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
