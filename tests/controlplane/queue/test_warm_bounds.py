"""More pinned versions than one turn asks for, old workers, and the prefixes of system prompts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from contract.messages.protocol import Control
from contract.queue.fair_queue import quarantine_key
from controlplane.adapters.models import Adapter
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import Alias, AliasRevision
from controlplane.aliases.services import alias_change, alias_create, alias_ramp
from controlplane.queue.placement import prefix_warmth, warmth
from controlplane.queue.placement.prefix_warmth import kept_prefixes, prefixes_keep, wanted
from controlplane.queue.placement.residency import Prefetched, prefetched
from controlplane.queue.placement.warmth import PINNED, Wanted, warmth_keep
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.conftest import Party
from tests.controlplane.queue.test_residency import Pool, adapter, add, kept, pool

__all__ = ["adapter", "kept", "pool"]


def test_all_pinned_versions_have_their_turn(
    adapter: Adapter, pool: Pool, kept: list[Wanted], settings: Any, monkeypatch: Any
) -> None:
    """Each within as many turns as a pin lasts."""
    monkeypatch.setattr(warmth, "MAX_MESSAGES", 3)
    monkeypatch.setitem(warmth.MAX_OF_TENANT, PINNED, 100)
    versions = [add(adapter) for _ in range(8)]
    kept += [Wanted(version, PINNED) for version in versions]
    pool.beat("w-1")
    asked: set[str] = set()
    for turn in range(3):
        monkeypatch.setattr(warmth.time, "time", lambda at=turn: at * settings.WARMTH_TURN_S)
        assert warmth_keep() == 3
        asked |= {message.adapter.digest for message in pool.asked("w-1") if message.adapter}
    assert asked == {version.digest for version in versions}


def test_nobody_waits_for_workers_that_cannot(adapter: Adapter, pool: Pool) -> None:
    version = add(adapter)
    pool.beat("old", controls=())
    began = time.monotonic()
    assert prefetched([version], timeout_s=8) == Prefetched(1, 0)
    assert time.monotonic() - began < 4
    pool.beat("new", resident_digests=(version.digest,))
    assert prefetched([version], timeout_s=8) == Prefetched(2, 1)
    assert time.monotonic() - began < 6


def make(name: str, prompt: str = "Be brief.", warm: str = "pinned", **more: Any) -> Alias:
    target = (Part(adapter="invoices", version=more.pop("version", 1)),)
    contents = Contents(primary=target, system_prompt=prompt, warmth=warm, **more)
    return alias_create(name=name, contents=contents)


def metric() -> dict[str, float]:
    [found] = kept_prefixes()
    return {sample.labels["state"]: sample.value for sample in found.samples}


def test_a_prompt_is_told_once_renewed_and_let_go(
    acme: Party, adapter: Adapter, pool: Pool, settings: Any
) -> None:
    for _ in range(2):
        add(adapter)
    alias = make("prod")
    make("cold", warm="cold")
    make("silent", prompt="")
    pool.beat("w-1")
    assert prefixes_keep() == 1
    [message] = pool.asked("w-1")
    assert (message.action, message.system_prompt) == (Control.PIN_PREFIX, "Be brief.")
    assert message.tenant_id == str(acme.tenant.id) and len(message.adapters) == 1
    assert message.pin_s == 6 * settings.WARMTH_TURN_S
    assert metric() == {"ready": 0, "missing": 1}
    pool.beat("w-1", kept_prefixes=(message.prefix,))
    assert metric() == {"ready": 1, "missing": 0}
    assert prefixes_keep() == 1
    [renewed] = pool.asked("w-1")
    assert (renewed.prefix, renewed.system_prompt) == (message.prefix, "")
    canary = (Part(adapter="invoices", version=2),)
    alias_change(alias=alias, changes={"canary": canary})
    assert [item.name for item in wanted()] == [message.prefix], "it has no share"
    alias_ramp(alias=alias, percent=5)
    assert prefixes_keep() == 2
    assert len({asked.prefix for asked in pool.asked("w-1")}) == 2
    alias_change(alias=alias, changes={"canary": (), "system_prompt": "Be long."})
    assert prefixes_keep() == 2
    new, gone = pool.asked("w-1")
    assert (new.system_prompt, gone.prefix, gone.pin_s) == ("Be long.", message.prefix, 0.0)
    key = quarantine_key(pool.name)
    pool.redis.hset(key, new.adapters[0].digest, "1")
    assert wanted() == [], "it ended workers"
    pool.redis.delete(key)
    pool.beat("w-1", controls=())
    assert prefixes_keep() == 0, "an old worker"
    pool.beat("w-1", base_model="another")
    assert prefixes_keep() == 0


def test_each_tenant_has_so_many_and_all_take_turns(
    acme: Party, globex: Party, adapter: Adapter, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(adapter)
    for number in range(6):
        make(f"a-{number}", prompt=f"Be {number}.", warm="warm" if number < 3 else "pinned")
    with tenant_scope(globex.tenant.id):
        other = Adapter.objects.create(name="invoices", base_model=adapter.base_model)
        add(other)
        make("theirs")
    own = [item for item in wanted() if item.tenant_id == acme.tenant.id]
    assert len(own) == prefix_warmth.MAX_OF_TENANT == 4 and len(wanted()) == 5
    rows = AliasRevision.objects.filter(pk__in=[item.revision_id for item in own])
    assert sorted(rows.values_list("warmth", flat=True)) == ["pinned"] * 3 + ["warm"]
    monkeypatch.setattr(prefix_warmth, "MAX_OF_ALL", 2)
    assert {item.tenant_id for item in wanted()} == {acme.tenant.id, globex.tenant.id}
