"""Prefixes are found again by those who may, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine import Engine, FinishReason, Request
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PageKeys, PrefixCache
from tests.engine.conftest import MakeEngine, Oracle, Result, prompt, request, run

PAGE_BYTES = 2048 * 4


def of_tenant(tenant_id: str, *args: Any, **kwargs: Any) -> Request:
    made = request(*args, **kwargs)
    return Request(
        request_id=made.request_id,
        token_ids=made.token_ids,
        sampling=made.sampling,
        adapters=made.adapters,
        tenant_id=tenant_id,
    )


def cached(result: Result) -> int:
    assert result.last is not None
    return result.last.num_cached_tokens


@pytest.mark.parametrize("adapter", [None, "patterns"])
def test_an_identical_prompt_is_computed_once(
    make_engine: MakeEngine, oracle: Oracle, adapter: str | None
) -> None:
    engine = make_engine(max_step_tokens=24)
    wanted = oracle.generate(prompt(1, 50), 8, adapter)
    first = run(engine, request("1", prompt(1, 50), adapter=adapter, max_tokens=8), check=True)
    second = run(engine, request("2", prompt(1, 50), adapter=adapter, max_tokens=8), check=True)
    assert (cached(first["1"]), cached(second["2"])) == (0, 48)
    assert first["1"].token_ids == second["2"].token_ids == wanted


def test_one_token_at_least_is_computed(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    for request_id, expected in (("1", 0), ("2", 16)):
        got = run(engine, request(request_id, prompt(1, 32), max_tokens=3))[request_id]
        assert cached(got) == expected
        assert got.token_ids == oracle.generate(prompt(1, 32), 3)


def test_a_conversation_goes_on_after_its_answer(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    turn = prompt(1, 20)
    turn = turn + run(engine, request("1", turn, max_tokens=30))["1"].token_ids + prompt(2, 5)
    got = run(engine, request("2", turn, max_tokens=4))["2"]
    assert cached(got) == 48  # the last token of an answer is never computed
    assert got.token_ids == oracle.generate(turn, 4)


def test_what_follows_the_first_difference_is_not_found(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine()
    first, other = prompt(1, 70), prompt(1, 70)
    other[20] = (other[20] + 1) % 256
    run(engine, request("1", first, max_tokens=2))
    got = run(engine, request("2", other, max_tokens=6))["2"]
    assert cached(got) == 16
    assert got.token_ids == oracle.generate(other, 6)


def test_requests_share_the_pages_while_they_run(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    run(engine, request("0", prompt(1, 50), max_tokens=1))
    for i in range(4):
        engine.add(request(str(i), prompt(1, 50), max_tokens=8))
    engine.step()
    assert engine.stats().kv_pages == 3 + 4
    results = run(engine, check=True)
    for result in results.values():
        assert result.token_ids == oracle.generate(prompt(1, 50), 8)[-len(result.token_ids) :]


def test_nobody_is_served_what_is_not_theirs(make_engine: MakeEngine) -> None:
    """Every pair of tenant and adapters is a stranger to every other."""
    engine = make_engine(arena_bytes=16 << 20)
    identities: list[tuple[str, str | dict[str, float] | None]] = [
        ("a", None),
        ("b", None),
        ("a", "qv-16"),
        ("b", "qv-16"),
        ("a", "all-4"),
        ("a", {"qv-16": 0.5}),
        ("a", {"qv-16": 1.0, "all-4": 1.0}),
        ("a", {"all-4": 1.0, "qv-16": 1.0}),
        ("a", {"qv-16": 1.0, "all-4": 0.5}),
    ]
    for expected in (0, 32):
        for i, (tenant, adapter) in enumerate(identities):
            made = of_tenant(tenant, str(i), prompt(1, 40), adapter=adapter, max_tokens=2)
            assert cached(run(engine, made)[str(i)]) == expected


def test_keys_differ_with_every_part_of_the_identity() -> None:
    def key(tenant: str, adapters: tuple[tuple[str, float], ...], tokens: list[int]) -> bytes:
        return PageKeys(tenant, adapters, 2).first(len(tokens) // 2, tokens)[-1]

    keys = [
        key("", (), [1, 2]),
        key("a", (), [1, 2]),
        key("", (("a", 1.0),), [1, 2]),
        key("", (("a", 1.0), ("b", 1.0)), [1, 2]),
        key("", (("b", 1.0), ("a", 1.0)), [1, 2]),
        key("", (("a", 1.0 + 2**-52),), [1, 2]),
        key("", (), [2, 1]),
        key("", (), [1, 2, 1, 2]),
        key("", (), [0, 0, 1, 2]),
    ]
    assert len(set(keys)) == len(keys)


def test_idle_pages_go_when_pages_are_wanted_the_oldest_first() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool)
    tables = {}
    for name in (b"a", b"b"):
        tables[name] = pool.take(2, PageUse.KV)
        for i, page in enumerate(tables[name]):
            cache.add(name + bytes([i]), page)
        cache.release(tables[name])
    taken = cache.take([b"a\0"])  # read, and so the youngest
    cache.release(taken)
    assert pool.num_free == 0 and cache.num_idle == 4
    cache.evict(2)
    assert pool.num_free == 2
    # a's second page is older than either of b's, whose second went next.
    assert [len(cache.take([name, name[:1] + b"\1"])) for name in (b"a\0", b"b\0")] == [1, 1]
    cache.check_integrity()
    assert cache.num_idle == 0
    cache.evict(4)
    assert pool.num_free == 2  # what is read stays


def test_prefixes_go_before_idle_adapters_and_before_anyone_is_preempted(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    engine = make_engine(arena_bytes=62 * PAGE_BYTES)
    run(engine, request("a", prompt(3, 4), adapter="ko-1", max_tokens=1))
    for i in range(12):
        got = run(engine, request(str(i), prompt(i, 100), max_tokens=3), check=True)[str(i)]
        assert got.token_ids == oracle.generate(prompt(i, 100), 3)
    stats = engine.stats()
    assert stats.resident_digests == ("ko-1",)
    assert stats.num_preemptions == 0
    assert stats.cached_pages > 0


def test_what_was_preempted_is_found_again(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(arena_bytes=62 * PAGE_BYTES)
    requests = [request(str(i), prompt(i, 34), max_tokens=150) for i in range(6)]
    results = run(engine, *requests, check=True)
    assert engine.stats().num_preemptions > 0
    for i in range(6):
        assert results[str(i)].token_ids == oracle.generate(prompt(i, 34), 150)
        assert cached(results[str(i)]) == 0  # its own pages are no hit


def test_without_the_cache_nothing_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for i in range(2):
        assert cached(run(engine, request(str(i), prompt(1, 40), max_tokens=2))[str(i)]) == 0
    assert engine.stats().cached_pages == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_interleaving_leaks_no_page(make_engine: MakeEngine, oracle: Oracle, seed: int) -> None:
    """Shared beginnings, several tenants and adapters, cancels, and hardly any memory."""
    choose = random.Random(seed)
    engine = make_engine(
        arena_bytes=choose.choice([60, 70]) * PAGE_BYTES,
        max_step_tokens=choose.choice([8, 32, 200]),
        max_running=choose.choice([2, 5, 9]),
    )
    wanted: dict[str, list[int]] = {}
    results: dict[str, Result] = {}

    def step(engine: Engine) -> None:
        for output in engine.step():
            results.setdefault(output.request_id, Result()).add(output)
        engine.check_integrity()

    for i in range(30):
        tokens = prompt(choose.randrange(2), choose.choice([16, 33, 64, 90]))
        adapter = choose.choice([None, "qv-16", "ko-1"])
        made = of_tenant(choose.choice("ab"), str(i), tokens, adapter=adapter, max_tokens=6)
        wanted[str(i)] = oracle.generate(tokens, 6, adapter)
        engine.add(made)
        if choose.random() < 0.15:
            engine.cancel(choose.choice(list(wanted)))
        for _ in range(choose.randrange(3)):
            step(engine)
    while engine.has_work():
        step(engine)
    assert results.keys() == wanted.keys()
    assert any(cached(result) for result in results.values())
    for request_id, result in results.items():
        if result.finish_reason == FinishReason.CANCELLED:
            assert result.token_ids == wanted[request_id][: len(result.token_ids)]
        else:
            assert result.token_ids == wanted[request_id]
    stats = engine.stats()
    assert stats.free_pages == stats.num_pages - stats.adapter_pages
