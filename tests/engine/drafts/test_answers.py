"""Drafts from a tenant's own earlier answers, and from nobody else's."""

from __future__ import annotations

from typing import Any

from engine import Engine, Request
from engine.drafts.answers import END, AnswerMemory
from engine.drafts.lookup import Copying
from tests.engine.conftest import MakeEngine, prompt, request, run


def asked(name: str, **fields: Any) -> Request:
    """The same question each time, whose answer repeats nothing of itself."""
    said: dict[str, Any] = {"tenant_id": "acme", "adapter": "all-4", "remember": True, **fields}
    return request(name, prompt(5, 20), max_tokens=40, **said)


def drafted(engine: Engine, own: Request) -> tuple[int, list[int]]:
    """How many drafts came from memory, and the answer."""
    before = engine.stats().drafts["memory"].drafted
    answer = run(engine, own, check=True)[own.request_id].token_ids
    return engine.stats().drafts["memory"].drafted - before, answer


def test_only_a_tenants_own_answers_of_the_same_adapters_are_remembered(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(speculation=True, prefix_cache=False)
    count, answer = drafted(engine, asked("first"))
    steps = engine.stats().step
    assert count == 0
    count, again = drafted(engine, asked("again"))
    assert count > 20 and again == answer
    assert engine.stats().step - steps < steps / 2
    for name, fields in (
        ("of another tenant", {"tenant_id": "globex"}),
        ("without the wish", {"remember": False}),
        ("of another adapter", {"adapter": "qv-16"}),
        ("of a blend", {"adapter": {"all-4": 0.5, "mlp-rs": 1.5}}),
        ("of the base", {"adapter": None}),
        ("turned off", {"speculation": False}),
    ):
        count, other = drafted(engine, asked(name, **fields))
        assert count == 0, name
        if name in ("of another tenant", "without the wish", "turned off"):
            assert other == answer
    engine.forget_answers("acme")
    assert drafted(engine, asked("forgotten")) == (0, answer)
    assert drafted(engine, asked("known again"))[0] > 20
    assert drafted(engine, asked("of globex", tenant_id="globex"))[0] > 20, "its own"
    engine.unregister_adapter("all-4")
    left = engine._speculation._answers._memories
    assert all("all-4" not in {digest for digest, _ in key[1]} for key in left)


def test_no_token_of_one_tenant_is_drafted_for_another(make_engine: MakeEngine) -> None:
    """Markers: a prompt ends with what one tenant was answered; only that tenant gets more."""
    engine = make_engine(speculation=True, prefix_cache=False)
    marker = 200
    _, answer = drafted(engine, asked("marked", logit_bias={marker: 100.0}))
    assert answer == [marker] * 40

    def ask(name: str, tenant_id: str) -> int:
        own = [*prompt(6, 20), marker, marker]
        fields: dict[str, Any] = {"tenant_id": tenant_id, "adapter": "all-4", "remember": True}
        return drafted(engine, request(name, own, max_tokens=8, **fields))[0]

    assert ask("theirs", "globex") == 0
    assert ask("own", "acme") > 0


def test_a_memory_is_bounded_and_answers_stay_apart() -> None:
    memory = AnswerMemory()
    for number in range(100):
        memory.add([number, *range(200, 1000), number])
    assert len(memory.token_ids) < 17_500
    assert memory.token_ids[0] == memory.token_ids[-1] == END
    recalling = Copying(memory.index, memory.token_ids, [998, 999, 99])
    assert recalling.next([]) == (200, 1), "the answer ended there; another begins with 99"
    recalling = Copying(memory.index, memory.token_ids, [99, 200, 201])
    assert recalling.next([]) == (202, 3)
    memory.clear()
    assert memory.token_ids == [END]
    assert Copying(memory.index, memory.token_ids, [99, 200, 201]).next([]) is None
