"""What one tenant has in a cache is new to every other, and a flood displaces its own."""

from __future__ import annotations

import threading

from contract.tenant_cache import TenantCache


def test_each_tenant_has_its_own() -> None:
    cache: TenantCache[str, int] = TenantCache(4)
    cache.put("a", "x", 1)
    assert (cache.get("a", "x"), cache.get("b", "x")) == (1, None)
    cache.put("b", "x", 2)
    cache.put("a", "x", 3)
    assert (cache.get("a", "x"), cache.get("b", "x"), len(cache)) == (3, 2, 2)


def test_a_flood_displaces_its_own_entries_alone() -> None:
    cache: TenantCache[int, int] = TenantCache(10)
    for number in range(3):
        cache.put("calm", number, number)
    for number in range(1000):
        cache.put("flood", number, number)
    assert [cache.get("calm", number) for number in range(3)] == [0, 1, 2]
    assert [cache.get("flood", number) for number in range(992, 1000)] == [None, *range(993, 1000)]
    assert len(cache) == 10


def test_one_that_is_alone_may_fill_it_and_keeps_what_it_used_last() -> None:
    cache: TenantCache[int, int] = TenantCache(3)
    for number in range(3):
        cache.put("a", number, number)
    assert cache.get("a", 0) == 0
    cache.put("a", 3, 3)
    assert [cache.get("a", number) for number in range(4)] == [0, None, 2, 3]


def test_of_many_tenants_the_one_that_came_longest_ago_gives_up() -> None:
    cache: TenantCache[str, int] = TenantCache(3)
    for tenant in "abc":
        cache.put(tenant, "x", 1)
    assert cache.get("a", "x") == 1
    cache.put("d", "x", 1)
    assert [cache.get(tenant, "x") for tenant in "abcd"] == [1, None, 1, 1]
    for number in range(1000):  # nothing is left of tenants without entries
        cache.put(f"t{number}", "x", 1)
    assert (len(cache), len(cache._entries)) == (3, 3)


def test_threads() -> None:
    cache: TenantCache[int, int] = TenantCache(50)

    def use(tenant: str) -> None:
        for number in range(2000):
            cache.put(tenant, number % 40, number)
            found = cache.get(tenant, number % 40)
            assert found is None or found == number

    threads = [threading.Thread(target=use, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == sum(map(len, cache._entries.values())) == 50
