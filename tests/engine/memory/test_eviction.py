"""Who gives way first, decided from numbers alone."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.adapters.host_memory import HostMemory
from engine.adapters.idle import IdleAdapters, candidate_of
from engine.adapters.loader import AdapterLoader, LoadLimits, packed_candidate_of
from engine.adapters.pages import AdapterPages
from engine.adapters.record import Adapter, AdapterState
from engine.memory.eviction import EvictionCandidate, ReloadCosts, eviction_order, retention_value
from engine.memory.eviction_index import EvictionIndex
from engine.memory.page_pool import PagePool


def order(*candidates: EvictionCandidate[str], now: int = 100) -> str:
    return "".join(candidate.owner for candidate in eviction_order(candidates, now))


def test_of_two_alike_the_least_recently_used_goes() -> None:
    assert order(EvictionCandidate("a", 4, 1.0, 50), EvictionCandidate("b", 4, 1.0, 40)) == "ba"


def test_of_two_as_old_the_cheaper_page_goes() -> None:
    assert order(EvictionCandidate("a", 4, 1.0, 50), EvictionCandidate("b", 40, 1.0, 50)) == "ba"
    assert order(EvictionCandidate("a", 4, 2.0, 50), EvictionCandidate("b", 4, 1.0, 50)) == "ba"


def test_age_outweighs_cost_in_the_end() -> None:
    dear, cheap = EvictionCandidate("dear", 1, 10.0, 0), EvictionCandidate("cheap", 1, 1.0, 0)
    fresh = EvictionCandidate("fresh", 1, 1.0, 95)
    assert eviction_order([dear, fresh, cheap], 100) == [cheap, dear, fresh]


def test_of_equal_value_the_older_then_the_smaller_goes() -> None:
    assert order(EvictionCandidate("b", 2, 2.0, 7), EvictionCandidate("a", 1, 1.0, 7)) == "ab"
    assert (
        order(
            EvictionCandidate("c", 9, 0.0, 8),
            EvictionCandidate("b", 9, 0.0, 7),
            EvictionCandidate("a", 1, 0.0, 7),
        )
        == "abc"
    )


CANDIDATES = st.lists(
    st.builds(
        EvictionCandidate,
        owner=st.integers(),
        num_pages=st.integers(1, 500),
        reload_s=st.floats(0, 10),
        last_use=st.integers(0, 1000),
        is_pinned=st.booleans(),
    )
)


@given(CANDIDATES)
def test_all_but_the_pinned_go_in_the_order_of_their_value(
    candidates: list[EvictionCandidate[int]],
) -> None:
    going = eviction_order(candidates, 1000)
    assert sorted(map(id, going)) == sorted(id(c) for c in candidates if not c.is_pinned)
    values = [retention_value(candidate, 1000) for candidate in going]
    assert values == sorted(values)
    assert all(retention_value(c, 1000) == float("inf") for c in candidates if c.is_pinned)


def test_what_pages_of_an_8b_model_on_a_gpu_cost() -> None:
    """An adapter is back from host memory before its pages' worth of prefix is computed."""
    costs = ReloadCosts.estimate(
        page_bytes=2 << 20, num_params=7_000_000_000, page_size=16, is_cpu=False
    )
    assert costs.adapter(42, is_in_host=True) < 0.005
    assert 0.02 < costs.adapter(42, is_in_host=False) < 0.1
    assert costs.adapter(42, is_in_host=True) / 42 < costs.prefix
    assert costs.prefix < costs.adapter(42, is_in_host=False) / 42


@pytest.mark.parametrize("seed", range(30))
def test_idle_adapters_go_in_that_order_without_a_look_at_all(seed: int) -> None:
    """They come and go, and host memory drops some packed adapters, as time goes on."""
    chance, now = random.Random(seed), 0
    pages = AdapterPages(PagePool(2000))
    costs = ReloadCosts(host=0.01, disk=0.02, prefix=1.0)
    idle, packed = IdleAdapters(pages, costs), object()
    known: set[Adapter] = set()
    for i in range(300):
        now += chance.choice([0, 1, 20])
        if not known or chance.random() < 0.5:
            num_pages, tail = chance.choice([1, 2, 3, 9]), chance.randrange(8)
            place = pages.take(num_pages, tail)
            host: Any = chance.choice([None, packed])
            adapter = Adapter(digest=str(i), path=Path(), num_pages=num_pages, place=place)
            adapter.host, adapter.last_use = host, now - chance.choice([0, 3, 40])
            idle.add(adapter)
            known.add(adapter)
        for adapter in known:
            if chance.random() < 0.05:
                adapter.host = None
        candidates = [candidate_of(costs, adapter) for adapter in known]
        first = idle.first(now)
        assert first is not None
        wanted = eviction_order(candidates, now)[0]
        assert first == wanted or (retention_value(first, now), first.last_use) == (
            retention_value(wanted, now),
            wanted.last_use,
        )
        goes = first.owner if chance.random() < 0.7 else chance.choice(list(known))
        if chance.random() < 0.4:
            num_free = pages._pool.num_free
            num_idle = pages.num_idle
            idle.remove(goes)
            known.remove(goes)
            assert goes.place is not None
            pages.release(goes.place)
            assert num_idle - pages.num_idle == pages._pool.num_free - num_free
        idle.check_integrity(known)
        places = [adapter.place for adapter in known]
        pages.check_integrity(places, places)


def test_of_ten_thousand_few_are_looked_at() -> None:
    seen: list[int] = []

    def look(owner: int) -> EvictionCandidate[int]:
        seen.append(owner)
        return EvictionCandidate(owner, 1 + owner % 3, 1.0, last_use=owner)

    index = EvictionIndex(look)
    for owner in random.Random(0).sample(range(10_000), 10_000):
        index.add(owner)
    for going in eviction_order(list(map(look, range(10_000))), 10_000)[:100]:
        seen.clear()
        assert index.first(10_000) == going
        assert len(seen) <= 2 * 3  # kinds
        index.remove(going.owner)


class PackedAdapters:
    """Adapters in a small host memory that come and go, are copied, used and evicted."""

    def __init__(self, seed: int) -> None:
        self.chance, self.pool = random.Random(seed), PagePool(8)
        self.costs = ReloadCosts(host=0.01, disk=0.02, prefix=1.0)
        self.host = HostMemory(torch.zeros(1, 1), 40 * 4)
        limits = LoadLimits(num_threads=1)
        reader: Any = None
        self.loader = AdapterLoader(
            reader=reader,
            host=self.host,
            pool=self.pool,
            costs=self.costs,
            limits=limits,
            clock=lambda: 0.0,
        )
        self.all: list[Adapter] = []

    @property
    def there(self) -> list[Adapter]:
        return [adapter for adapter in self.all if adapter.host is not None]

    def load(self, num_pages: int) -> None:
        """Room has been made; the adapter has been packed."""
        adapter = Adapter(digest=str(len(self.all)), path=Path(), num_pages=num_pages)
        adapter.host = self.host.take(num_pages)
        adapter.loading, adapter.state = Future(), AdapterState.LOADING
        adapter.loading.set_result(None)
        self.loader._finish(adapter)
        self.all.append(adapter)

    def move(self, adapter: Adapter) -> None:
        """One thing that may happen to a packed adapter."""
        if adapter.state is AdapterState.HOST and self.chance.random() < 0.5:
            adapter.state, adapter.arrival = AdapterState.COPYING, cast(Any, object())
            self.loader.hold(adapter)
        elif adapter.state is AdapterState.COPYING:
            adapter.state, adapter.arrival = AdapterState.RESIDENT, None
            adapter.last_use = self.pool.time
            self.loader.let_go(adapter)
        elif adapter.state is AdapterState.RESIDENT and self.chance.random() < 0.5:
            adapter.state = AdapterState.HOST
        elif adapter.arrival is None and self.chance.random() < 0.2:
            self.loader.drop(adapter)
            adapter.state = AdapterState.DISK
        else:
            adapter.last_use = self.pool.time

    def going(self, num_pages: int, keep: set[str]) -> list[Adapter] | None:
        """Who has to go, by a look at all; None when that is not enough."""
        evictable = [
            packed_candidate_of(self.costs, adapter)
            for adapter in self.there
            if adapter.arrival is None
            and (adapter.digest not in keep or adapter.state is AdapterState.RESIDENT)
        ]
        gone, num_free = [], self.host.num_free
        for candidate in eviction_order(evictable, self.pool.time):
            if num_free >= num_pages:
                break
            gone.append(candidate.owner)
            num_free += candidate.num_pages
        return gone if num_free >= num_pages else None


@pytest.mark.parametrize("seed", range(30))
def test_packed_adapters_go_in_that_order_without_a_look_at_all(seed: int) -> None:
    packed = PackedAdapters(seed)
    chance, num_refused = packed.chance, 0
    for _ in range(400):
        packed.pool.time += chance.choice([1, 1, 20])
        if there := packed.there:
            packed.move(chance.choice(there))
        packed.pool.time += 1  # no two are as old
        num_pages = chance.choice([1, 2, 3, 9, 30])
        keep = {adapter.digest for adapter in packed.there if chance.random() < 0.3}
        wanted = packed.going(num_pages, keep)
        before = packed.there
        assert packed.loader._make_room(num_pages, keep) == (wanted is not None)
        gone = [adapter for adapter in before if adapter.host is None]
        assert set(gone) == set(wanted or [])
        assert all(a.state in (AdapterState.DISK, AdapterState.RESIDENT) for a in gone)
        packed.loader._evictable.check_integrity()
        if wanted is None:
            num_refused += 1
        else:
            packed.load(num_pages)
    assert num_refused and len(packed.all) > 100
