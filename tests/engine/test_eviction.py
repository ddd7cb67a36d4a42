"""Who gives way first, decided from numbers alone."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

import random
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.adapter_pages import AdapterPages
from engine.adapter_record import Adapter
from engine.eviction import Holding, ReloadCosts, eviction_order, worth
from engine.idle_adapters import IdleAdapters
from engine.memory import PagePool


def order(*holdings: Holding[str], now: int = 100) -> str:
    return "".join(holding.owner for holding in eviction_order(holdings, now))


def test_of_two_alike_the_least_recently_used_goes() -> None:
    assert order(Holding("a", 4, 1.0, 50), Holding("b", 4, 1.0, 40)) == "ba"


def test_of_two_as_old_the_cheaper_page_goes() -> None:
    assert order(Holding("a", 4, 1.0, 50), Holding("b", 40, 1.0, 50)) == "ba"
    assert order(Holding("a", 4, 2.0, 50), Holding("b", 4, 1.0, 50)) == "ba"


def test_age_outweighs_cost_in_the_end() -> None:
    dear, cheap = Holding("dear", 1, 10.0, 0), Holding("cheap", 1, 1.0, 0)
    fresh = Holding("fresh", 1, 1.0, 95)
    assert eviction_order([dear, fresh, cheap], 100) == [cheap, dear, fresh]


def test_of_equal_worth_the_older_then_the_smaller_goes() -> None:
    assert order(Holding("b", 2, 2.0, 7), Holding("a", 1, 1.0, 7)) == "ab"
    assert order(Holding("c", 9, 0.0, 8), Holding("b", 9, 0.0, 7), Holding("a", 1, 0.0, 7)) == "abc"


HOLDINGS = st.lists(
    st.builds(
        Holding,
        owner=st.integers(),
        num_pages=st.integers(1, 500),
        reload_s=st.floats(0, 10),
        last_use=st.integers(0, 1000),
        is_pinned=st.booleans(),
    )
)


@given(HOLDINGS)
def test_all_but_the_pinned_go_in_the_order_of_their_worth(holdings: list[Holding[int]]) -> None:
    going = eviction_order(holdings, 1000)
    assert sorted(map(id, going)) == sorted(id(h) for h in holdings if not h.is_pinned)
    values = [worth(holding, 1000) for holding in going]
    assert values == sorted(values)
    assert all(worth(h, 1000) == float("inf") for h in holdings if h.is_pinned)


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
    """They come and go, and host memory drops images of some, as time goes on."""
    chance, now = random.Random(seed), 0
    pages = AdapterPages(PagePool(2000))
    costs = ReloadCosts(host=0.01, disk=0.02, prefix=1.0)
    idle, image = IdleAdapters(pages, costs), object()
    known: set[Adapter] = set()
    for i in range(300):
        now += chance.choice([0, 1, 20])
        if not known or chance.random() < 0.5:
            num_pages, tail = chance.choice([1, 2, 3, 9]), chance.randrange(8)
            place = pages.take(num_pages, tail)
            host: Any = chance.choice([None, image])
            adapter = Adapter(digest=str(i), path=Path(), num_pages=num_pages, place=place)
            adapter.host, adapter.last_use = host, now - chance.choice([0, 3, 40])
            idle.add(adapter)
            known.add(adapter)
        for adapter in known:
            if chance.random() < 0.05:
                adapter.host = None
        holdings = [idle._holding(adapter) for adapter in known]
        first = idle.first(now)
        assert first is not None
        wanted = eviction_order(holdings, now)[0]
        assert first == wanted or (worth(first, now), first.last_use) == (
            worth(wanted, now),
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
