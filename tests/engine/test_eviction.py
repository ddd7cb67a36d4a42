"""Who gives way first, decided from numbers alone."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")  # GPU machines have none

from hypothesis import given
from hypothesis import strategies as st

from engine.eviction import Holding, ReloadCosts, eviction_order, worth


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
