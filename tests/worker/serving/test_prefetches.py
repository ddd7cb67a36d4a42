"""Which prefetches a worker takes on, in which order, and how long pins last."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from contract.messages.protocol import AdapterRef, Control, ControlMessage, Tier
from engine.request import ORIGINAL
from engine.stats import EngineStats
from tests.fakes import fake_config
from tests.worker.serving.test_adapters import Store
from worker.engine_process.channel import Command, Pin, Prefetch, Register, Unregister
from worker.serving import prefetches as module
from worker.serving.adapters import Adapters
from worker.serving.prefetches import MAX_ADAPTERS, MAX_PINS, MAX_WAITING, Prefetches
from worker.serving.tasks import Tasks


class Scene:
    """A worker's adapters and prefetches, with an engine that only notes what it is told."""

    def __init__(
        self,
        folder: Path,
        *,
        host_bytes: int = 1 << 20,
        disk_bytes: int = 1 << 20,
        adapter_precision: str | None = None,
    ) -> None:
        self.store = Store()
        self.sent: list[Command] = []
        self.now = 100.0
        config = fake_config(folder, worker_id="w", pool="p", redis_url="")
        config = dataclasses.replace(
            config,
            base_revision="r" * 64,
            adapter_cache_bytes=1 << 20,
            adapter_precision=adapter_precision,
        )
        self.adapters = Adapters(config, send=self.sent.append, fetch=self.store)
        self.failures: list[BaseException] = []
        self.tasks = Tasks(self.failures.append)
        self.prefetches = Prefetches(
            self.adapters,
            send=self.sent.append,
            tasks=self.tasks,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            clock=lambda: self.now,
        )

    def ask(self, ref: AdapterRef | None, tenant_id: str = "a", **fields: Any) -> None:
        self.prefetches.ask(
            ControlMessage(action=Control.PREFETCH, adapter=ref, tenant_id=tenant_id, **fields)
        )

    def told(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.sent if isinstance(command, kind)]

    def engine_has(self, *refs: AdapterRef, host: bool = False, **fields: Any) -> None:
        digests = tuple(ref.digest for ref in refs)
        where = {"host_digests": digests} if host else {"resident_digests": digests}
        self.adapters.note_stats(EngineStats(**where, **fields))

    async def settle(self) -> None:
        async with asyncio.timeout(10):
            while self.prefetches._running or self.prefetches._waiting:
                await asyncio.sleep(0.005)
        assert not self.failures


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    yield made
    await made.tasks.end()


async def test_it_is_brought_to_the_disk_and_into_the_engine(scene: Scene) -> None:
    gpu, host = scene.store.add("gpu"), scene.store.add("host")
    scene.ask(gpu)
    scene.ask(host, tier=Tier.HOST)
    assert scene.adapters.tier_of(gpu.digest) is Tier.STORE
    await scene.settle()
    assert {(c.digest, c.to_arena) for c in scene.told(Prefetch)} == {
        (gpu.digest, True),
        (host.digest, False),
    }
    assert scene.adapters.tier_of(gpu.digest) is Tier.DISK
    assert not scene.prefetches.note_arrivals()
    scene.engine_has(gpu)
    assert scene.prefetches.note_arrivals()
    assert not scene.prefetches.note_arrivals(), "it is told once"
    scene.ask(gpu)
    scene.ask(gpu, tier=Tier.HOST)
    assert scene.prefetches.outcomes == {
        "loaded": 2, "there": 2, "refused": 0, "failed": 0, "late": 0,
    }  # fmt: skip
    assert scene.store.num_fetches == 2


async def test_requests_go_first(scene: Scene) -> None:
    wanted, ahead = scene.store.add("wanted"), scene.store.add("ahead")
    scene.store.gate.clear()
    request = asyncio.create_task(scene.adapters.load_for_request(wanted))
    await asyncio.sleep(0)
    scene.ask(ahead)
    await asyncio.sleep(0.1)
    assert scene.store.num_fetches == 1, "a prefetch began before a request had its adapter"
    scene.store.gate.set()
    assert await request is Tier.STORE
    await scene.settle()
    assert scene.store.num_fetches == 2


async def test_what_waits_too_long_is_dropped(scene: Scene) -> None:
    scene.store.gate.clear()
    request = asyncio.create_task(scene.adapters.load_for_request(scene.store.add("wanted")))
    await asyncio.sleep(0)
    scene.ask(scene.store.add("ahead"))
    scene.now += module.WAIT_S + 1
    scene.store.gate.set()
    await request
    await scene.settle()
    assert scene.prefetches.outcomes["late"] == 1
    assert scene.store.num_fetches == 1


async def test_tenants_take_turns(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []  # in which they begin: threads may end in another
    load = scene.adapters.load

    async def note(ref: AdapterRef) -> None:
        order.append(ref.digest)
        await load(ref)

    monkeypatch.setattr(scene.adapters, "load", note)
    scene.store.gate.clear()
    for i in range(6):
        scene.ask(scene.store.add(f"many {i}"), "many")
    few = scene.store.add("few")
    scene.ask(few, "few")
    scene.store.gate.set()
    await scene.settle()
    assert order.index(few.digest) == module.NUM_AT_ONCE + 1
    assert len(order) == 7


async def test_a_tenant_brings_so_many_and_no_more(scene: Scene) -> None:
    for i in range(MAX_ADAPTERS + 5):
        scene.ask(scene.store.add(str(i)))
    await scene.settle()
    assert len(scene.told(Prefetch)) == MAX_ADAPTERS
    assert scene.prefetches.outcomes["refused"] == 5
    scene.ask(scene.store.add("another's"), "b")
    await scene.settle()
    assert len(scene.told(Prefetch)) == MAX_ADAPTERS + 1
    scene.now += module.WINDOW_S + 1
    scene.prefetches.expire()
    scene.ask(scene.store.add("later"))
    await scene.settle()
    assert len(scene.told(Prefetch)) == MAX_ADAPTERS + 2


async def test_a_tenant_brings_so_many_bytes(tmp_path: Path) -> None:
    scene = Scene(tmp_path, host_bytes=4 * 2500)  # a quarter: two adapters of 1000
    for i in range(4):
        scene.ask(scene.store.add(str(i)))
    await scene.settle()
    assert len(scene.told(Prefetch)) == 2
    tiny = Scene(tmp_path / "tiny", host_bytes=0)
    tiny.ask(tiny.store.add("0"))  # one may always come
    tiny.ask(tiny.store.add("1"))
    await tiny.settle()
    assert len(tiny.told(Prefetch)) == 1


async def test_a_failure_does_not_use_up_the_quota(scene: Scene) -> None:
    lost = AdapterRef(digest="0" * 64, config_key="c", tensors_key="t", num_bytes=1)
    scene.ask(lost)
    await scene.settle()
    assert scene.prefetches.outcomes["failed"] == 1
    assert scene.prefetches._brought.get("a", {}) == {}


async def test_a_full_disk_does_not_end_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the folder for a download cannot be made."""

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    refs = [scene.store.add(str(number)) for number in range(module.NUM_AT_ONCE + 2)]
    for ref in refs:
        scene.ask(ref)
    await scene.settle()
    assert scene.prefetches.outcomes["failed"] == len(refs)
    monkeypatch.undo()
    scene.ask(refs[0])
    await scene.settle()
    assert scene.prefetches.outcomes["loaded"] == 1


async def test_so_many_wait(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 10_000)
    scene.store.gate.clear()
    for i in range(MAX_WAITING + 10):
        scene.ask(scene.store.add(str(i)))
    refused = scene.prefetches.outcomes["refused"]
    assert refused == 10 - module.NUM_AT_ONCE
    scene.store.gate.set()
    await scene.settle()


async def test_pins_are_leases(scene: Scene) -> None:
    ref = scene.store.add("pinned")
    scene.ask(ref, pin_s=60.0)
    await scene.settle()
    assert scene.told(Pin) == [Pin((("a", ref.digest),))]
    scene.engine_has(ref, pinned_digests=(ref.digest,))
    scene.now += 50
    scene.ask(ref, pin_s=60.0)
    scene.now += 50
    scene.prefetches.expire()
    assert len(scene.told(Pin)) == 1, "it was asked for again"
    scene.engine_has(ref)  # the engine let it go for a request
    scene.prefetches.expire()
    assert scene.told(Pin)[-1] == Pin((("a", ref.digest),))
    scene.now += 20
    scene.prefetches.expire()
    assert scene.told(Pin)[-1] == Pin(())
    scene.adapters.drop(ref.digest)
    assert scene.told(Unregister) == [Unregister(ref.digest)], "its files are still held"


async def test_pinned_files_stay_on_the_disk_until_the_adapter_is_deleted(scene: Scene) -> None:
    ref = scene.store.add("pinned")
    scene.ask(ref, pin_s=1e9)
    await scene.settle()
    scene.adapters.drop(ref.digest)
    assert scene.told(Unregister) == []
    scene.prefetches.drop(ref.digest)
    assert scene.told(Pin)[-1] == Pin(())
    assert scene.told(Unregister) == [Unregister(ref.digest)]
    assert scene.adapters.tier_of(ref.digest) is Tier.STORE


async def test_an_original_has_a_name_of_its_own_in_fp8(tmp_path: Path) -> None:
    """The files are one, and so are their users; a worker in bf16 has one name alone."""
    scene = Scene(tmp_path, adapter_precision="fp8")
    original = scene.store.add("a")
    copy = dataclasses.replace(original, in_fp8=True)
    name = original.digest + ORIGINAL
    scene.ask(copy)
    await scene.settle()
    scene.ask(original, pin_s=10)
    await scene.settle()
    assert [each.digest for each in scene.told(Register)] == [original.digest, name]
    assert scene.told(Prefetch) == [Prefetch(original.digest, True), Prefetch(name, True)]
    assert scene.told(Pin)[-1] == Pin((("a", name),))
    assert scene.store.num_fetches == 1
    assert [part.digest for part in scene.adapters.parts_of((copy, original))] == [
        original.digest, name,
    ]  # fmt: skip
    scene.engine_has(copy)
    assert scene.adapters.on_disk_alone(9) == ()
    assert await scene.adapters.load_for_request(copy) is Tier.GPU
    assert await scene.adapters.load_for_request(original) is Tier.DISK
    for _ in range(2):
        scene.adapters.release(original.digest)
    scene.prefetches.drop(original.digest)
    scene.adapters.drop(original.digest)
    assert scene.told(Unregister) == [Unregister(original.digest), Unregister(name)]
    await scene.tasks.end()
    plain = Scene(tmp_path / "plain").adapters
    assert plain.name_of(copy) == plain.name_of(original) == original.digest


async def test_a_pin_ends_though_it_was_asked_for_ever(scene: Scene) -> None:
    scene.ask(scene.store.add("pinned"), pin_s=float("inf"))
    await scene.settle()
    scene.now += module.MAX_PIN_S + 1
    scene.prefetches.expire()
    assert scene.told(Pin)[-1] == Pin(())


async def test_a_tenant_has_so_many_pins(scene: Scene) -> None:
    for i in range(MAX_PINS + 3):
        scene.ask(scene.store.add(str(i)), pin_s=60.0)
    scene.ask(scene.store.add("another's"), "b", pin_s=60.0)
    await scene.settle()
    assert scene.prefetches.outcomes["refused"] == 3
    assert len(scene.told(Pin)[-1].wanted) == MAX_PINS + 1


async def test_pinned_files_leave_half_of_the_disk_to_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path, disk_bytes=4 * 1000)
    refs = [scene.store.add(str(number)) for number in range(3)]
    for number, ref in enumerate(refs):
        scene.ask(ref, str(number), pin_s=60.0)
    await scene.settle()
    assert [digest for _, digest in scene.told(Pin)[-1].wanted] == [r.digest for r in refs[:2]]
    assert scene.prefetches.outcomes["refused"] == 1
    scene.ask(refs[0], "0", pin_s=90.0)  # one that is pinned stays so
    scene.now += 61
    scene.prefetches.expire()
    scene.ask(refs[2], "2", pin_s=60.0)
    await scene.settle()
    assert {tenant for tenant, _ in scene.told(Pin)[-1].wanted} == {"0", "2"}
    await scene.tasks.end()


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": None},
        {"adapter": [1]},
        {"adapter": "x"},
        {"tier": "disk"},
        {"tier": 5},
        {"pin_s": "long"},
        {"pin_s": None},
        {"tenant_id": 5},
        {"digest": "../../etc"},
        {"digest": "A" * 64},
        {"digest": None},
        {"num_bytes": -1},
        {"num_bytes": "1"},
        {"num_bytes": True},
        {"tensors_key": 7},
    ],
)
async def test_what_makes_no_sense_is_refused(scene: Scene, fields: dict[str, Any]) -> None:
    ref: dict[str, Any] = scene.store.add("good").to_dict()
    message: dict[str, Any] = {"action": "prefetch", "tenant_id": "a", "adapter": ref}
    for name, value in fields.items():
        (ref if name in ref else message)[name] = value
    scene.prefetches.ask(ControlMessage.from_dict(message))
    assert scene.prefetches.outcomes["refused"] == 1
    assert scene.sent == []


async def test_a_pin_that_is_not_a_number_ends(scene: Scene) -> None:
    scene.ask(scene.store.add("pinned"), pin_s=float("nan"))
    await scene.settle()
    scene.prefetches.expire()
    assert scene.told(Pin) == []


async def test_where_adapters_are(scene: Scene) -> None:
    a, b, c = (scene.store.add(name) for name in "abc")
    for ref in (a, b, c):
        await scene.adapters.load_for_request(ref)
        scene.adapters.release(ref.digest)
    scene.adapters.note_stats(EngineStats(resident_digests=(a.digest,), host_digests=(b.digest,)))
    tiers = [scene.adapters.tier_of(ref.digest) for ref in (a, b, c)]
    assert tiers == [Tier.GPU, Tier.HOST, Tier.DISK]
    assert scene.adapters.on_disk_alone(5) == (c.digest,)
    assert scene.adapters.tier_of("0" * 64) is Tier.STORE
