"""Kept prefixes: leases that stay through pressure, shared out by tenant, and yield at last."""

from __future__ import annotations

from engine import Engine
from engine.request import AdapterPart, KeptPrefix
from tests.engine.conftest import MakeEngine, Oracle, prompt, request, run
from tests.engine.memory.test_pins import PAGE_BYTES, QV, cached, flood, settle


def kept(name: str, tokens: list[int], *, tenant: str = "a", adapters=QV) -> KeptPrefix:  # type: ignore[no-untyped-def]
    return KeptPrefix(name, tenant, adapters, tuple(tokens))


def hits(engine: Engine, tokens: list[int], tenant: str = "a") -> int:
    made = request("r", tokens + prompt(2, 9), adapter="qv-16", tenant_id=tenant, max_tokens=1)
    return cached(run(engine, made, check=True)["r"])


def test_it_stays_until_it_is_no_longer_wanted(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES)
    system = prompt(1, 70)
    engine.keep_prefixes([kept("one", system), kept("short", prompt(3, 9))])
    assert engine.stats().kept_prefixes == ("short",)
    settle(engine)
    assert engine.stats().kept_prefixes == ("short", "one")
    assert engine.stats().pinned_pages == 4
    for _ in range(2):
        flood(engine)
        assert hits(engine, system) == 64
        assert hits(engine, system, tenant="b") == 0
        engine.keep_prefixes([kept("one", system)])  # renewed
        assert not engine.has_work()
    engine.keep_prefixes([kept("two", prompt(4, 40))])
    settle(engine)
    flood(engine)
    assert (hits(engine, system), hits(engine, prompt(4, 40))) == (0, 32)
    assert engine.stats().kept_prefixes == ("two",)
    engine.keep_prefixes([])
    assert engine.stats().pinned_pages == 0 and engine.stats().kept_prefixes == ()


def test_two_names_may_mean_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES)
    system = prompt(1, 33)
    engine.keep_prefixes([kept("one", system), kept("two", system)])
    settle(engine)
    assert engine.stats().kept_prefixes == ("one", "two") and engine.stats().pinned_pages == 2
    engine.keep_prefixes([kept("two", system)])
    assert engine.stats().kept_prefixes == ("two",) and engine.stats().pinned_pages == 2


def test_a_tenant_gets_half_at_most(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=64 * PAGE_BYTES, pin_share=0.25)  # 16 pages
    own = [kept(f"a{i}", prompt(10 + i, 64)) for i in range(4)]
    engine.keep_prefixes([*own, kept("b", prompt(20, 48), tenant="b")])
    settle(engine)
    assert engine.stats().kept_prefixes == ("a0", "b", "a1")
    assert engine.stats().pinned_pages == 11
    engine.keep_prefixes([kept("long", prompt(9, 16 * 9))])
    settle(engine)
    assert engine.stats().pinned_pages == 0, "more than half"


def test_it_yields_to_who_cannot_run_beside_it(make_engine: MakeEngine, oracle: Oracle) -> None:
    """A pin that lasts refuses such a request; a lease gives its room, and is taken again."""
    engine = make_engine(arena_bytes=64 * PAGE_BYTES, pin_share=0.75)
    wanted = [
        kept("one", prompt(1, 330), adapters=()),
        kept("b", prompt(6, 330), tenant="b", adapters=()),
    ]
    engine.keep_prefixes(wanted)
    settle(engine)
    assert engine.stats().pinned_pages == 40
    tokens = prompt(5, 400)  # 26 pages
    got = run(engine, request("r", tokens, max_tokens=6), check=True)["r"]
    assert got.token_ids == oracle.generate(tokens, 6)
    assert engine.stats().pinned_pages == 0 and engine.stats().kept_prefixes == ()
    engine.keep_prefixes(wanted)
    settle(engine)
    assert engine.stats().kept_prefixes == ("one", "b")


def test_what_cannot_be_computed_harms_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(arena_bytes=70 * PAGE_BYTES)
    engine.keep_prefixes(
        [
            kept("unknown", prompt(1, 40), adapters=(AdapterPart(digest="nobody"),)),
            kept("vocabulary", [10**6] * 40, tenant="b"),
            kept("good", prompt(2, 40), tenant="c"),
        ]
    )
    settle(engine)
    assert engine.stats().kept_prefixes == ("good",)
    engine.unregister_adapter("qv-16")
    assert engine.stats().kept_prefixes == () and engine.stats().pinned_pages == 0
    engine.check_integrity()
