"""Prefetches: loads adapters that the control plane wants here before a request needs them.

The engine's name of an adapter stands for it here; a tenant's quota counts digests.

A prefetch begins when no request waits for an adapter's files, and takes a quarter of the threads
that download. The constants limit each tenant, so that nobody crowds out the others' adapters. A
pin is a lease: whoever wants it asks again before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from contract.messages.protocol import AdapterRef, ControlMessage, Tier
from engine.request import ORIGINAL
from worker.engine_process.channel import Command, Pin, Prefetch
from worker.serving.adapter_cache import DIGEST, NUM_DOWNLOADS, AdapterFetchError
from worker.serving.adapters import Adapters
from worker.serving.tasks import Tasks

log = logging.getLogger(__name__)

NUM_AT_ONCE = NUM_DOWNLOADS // 4
#: Seconds between two looks whether requests have their adapters.
BUSY_POLL_S = 0.02
#: Seconds after which a waiting prefetch is dropped: who still wants it asks again.
WAIT_S = 60.0
#: Largest number of waiting prefetches, of one tenant and of all.
MAX_WAITING, MAX_WAITING_OF_ALL = 64, 1024
#: A tenant's quota: number of adapters that its prefetches may bring within these seconds, and its
#: share of the engine's host memory; one adapter may always come.
WINDOW_S = 600.0
MAX_ADAPTERS = 32
SHARE = 0.25
#: Largest number of pinned adapters of a tenant, largest share of the disk for all pinned adapters,
#: and longest time of a pin.
MAX_PINS = 8
DISK_SHARE = 0.5
MAX_PIN_S = 600.0
#: Outcomes of prefetches, as the labels of a metric.
OUTCOMES = ("loaded", "there", "refused", "failed", "late")


@dataclass(slots=True)
class _Asked:
    ref: AdapterRef
    tier: Tier
    tenant_id: str
    at: float


@dataclass(slots=True)
class _Pin:
    """is_held  whether its files are kept on the disk"""

    tenant_id: str
    num_bytes: int
    until: float
    is_held: bool = False


class Prefetches:
    """Owns the prefetches that wait or run, the tenants' quotas, and the pins.

    host_bytes  the engine's host memory for adapters
    disk_bytes  the disk's room for adapters; files of pinned ones cannot be evicted
    """

    def __init__(
        self,
        adapters: Adapters,
        *,
        send: Callable[[Command], None],
        tasks: Tasks,
        host_bytes: int,
        disk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adapters, self._send, self._tasks, self._clock = adapters, send, tasks, clock
        self._max_bytes = int(host_bytes * SHARE)
        self._max_pinned_bytes = int(disk_bytes * DISK_SHARE)
        self._waiting: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by tenant, next first
        self._running: set[str] = set()
        self._brought: dict[str, OrderedDict[str, tuple[float, int]]] = {}  # tenant -> digest -> …
        self._coming: dict[str, tuple[Tier, float]] = {}  # the engine loads them
        self._pins: dict[str, _Pin] = {}
        self._sent_pins: Pin = Pin(())
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def ask(self, message: ControlMessage) -> None:
        """Take in a prefetch; refuse it if it makes no sense or is beyond a bound."""
        ref = message.adapter
        if not isinstance(ref, AdapterRef) or not _is_sane(message, ref):
            self._refuse(message, "it is not valid")
            return
        now = self._clock()
        if message.pin_s > 0 and not self._lease(message, ref, now):
            self._refuse(message, "its tenant, or all, have too many pins")
            return
        tier, name = Tier(message.tier), self._adapters.name_of(ref)
        if self._adapters.tier_of(name).rank <= tier.rank and self._is_kept(name):
            self.outcomes["there"] += 1
            self._send_pins()
            return
        queue = self._waiting.setdefault(message.tenant_id, deque())
        if name in self._running or any(self._adapters.name_of(a.ref) == name for a in queue):
            return  # it was asked for already
        if len(queue) >= MAX_WAITING or sum(map(len, self._waiting.values())) >= MAX_WAITING_OF_ALL:
            self._refuse(message, "too many wait")
        elif self._is_over_quota(message.tenant_id, ref, now):
            self._refuse(message, "its tenant's quota is used up")
        else:
            queue.append(_Asked(ref, tier, message.tenant_id, now))
            self._start()
        if not queue:
            self._waiting.pop(message.tenant_id, None)

    def note_arrivals(self) -> bool:
        """Return whether the engine has just loaded an adapter that was prefetched."""
        now, arrived = self._clock(), []
        for name, (tier, at) in list(self._coming.items()):
            if self._adapters.tier_of(name).rank <= tier.rank:
                arrived.append(name)
            if name in arrived or now - at > WAIT_S:
                del self._coming[name]
        return bool(arrived)

    def expire(self) -> None:
        """End the pins that nobody has asked for again, and forget what no longer counts."""
        now = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self._unpin(name)
        self._send_pins()
        for tenant_id in list(self._brought):
            self._forget_old(tenant_id, now)

    def drop(self, digest: str) -> None:
        """Forget a deleted adapter."""
        for tenant_id, queue in list(self._waiting.items()):
            kept = deque(asked for asked in queue if asked.ref.digest != digest)
            self._waiting[tenant_id] = kept
            if not kept:
                del self._waiting[tenant_id]
        for name in (digest, digest + ORIGINAL):
            if name in self._pins:
                self._unpin(name)
                self._send_pins()

    def _refuse(self, message: ControlMessage, why: str) -> None:
        self.outcomes["refused"] += 1
        log.info("prefetch refused: %s", why, extra={"tenant_id": message.tenant_id})

    # Quotas

    def _is_over_quota(self, tenant_id: str, ref: AdapterRef, now: float) -> bool:
        """Count the adapter in its tenant's quota; return whether it is used up."""
        self._forget_old(tenant_id, now)
        brought = self._brought.setdefault(tenant_id, OrderedDict())
        others = [size for digest, (_, size) in brought.items() if digest != ref.digest]
        if others and (
            len(others) >= MAX_ADAPTERS or sum(others) + ref.num_bytes > self._max_bytes
        ):
            return True
        brought[ref.digest] = now, ref.num_bytes
        brought.move_to_end(ref.digest)
        return False

    def _forget_old(self, tenant_id: str, now: float) -> None:
        brought = self._brought.get(tenant_id, OrderedDict())
        while brought and next(iter(brought.values()))[0] < now - WINDOW_S:
            brought.popitem(last=False)
        if not brought:
            self._brought.pop(tenant_id, None)

    # Loading

    def _start(self) -> None:
        while self._waiting and len(self._running) < NUM_AT_ONCE:
            tenant_id, queue = next(iter(self._waiting.items()))
            asked = queue.popleft()
            self._waiting.move_to_end(tenant_id)
            if not queue:
                del self._waiting[tenant_id]
            self._running.add(self._adapters.name_of(asked.ref))
            self._tasks.start(self._bring(asked))

    async def _bring(self, asked: _Asked) -> None:
        digest = asked.ref.digest
        try:
            outcome = await self._load(asked)
        except AdapterFetchError as error:
            outcome = "failed"
            log.warning("adapter %s cannot be prefetched: %s", digest, error)
        except Exception:  # such as a full disk: requests continue
            outcome = "failed"
            log.exception("adapter %s cannot be prefetched", digest)
        finally:
            self._running.discard(self._adapters.name_of(asked.ref))
        self.outcomes[outcome] += 1
        brought = self._brought.get(asked.tenant_id)
        if outcome != "loaded" and brought is not None:
            brought.pop(digest, None)
        self._start()

    async def _load(self, asked: _Asked) -> str:
        name = self._adapters.name_of(asked.ref)
        while self._adapters.is_loading:
            await asyncio.sleep(BUSY_POLL_S)
        if self._clock() - asked.at > WAIT_S:
            return "late"
        await self._adapters.load(asked.ref)
        self._send(Prefetch(name, to_arena=asked.tier is Tier.GPU))
        self._coming[name] = asked.tier, self._clock()
        pin = self._pins.get(name)
        if pin is not None and not pin.is_held:
            pin.is_held = True  # `_unpin` releases it
            self._send_pins()
        else:
            self._adapters.release(asked.ref.digest)
        return "loaded"

    # Pins

    def _lease(self, message: ControlMessage, ref: AdapterRef, now: float) -> bool:
        name = self._adapters.name_of(ref)
        until = now + min(message.pin_s, MAX_PIN_S)
        if name in self._pins:
            self._pins[name].until = max(self._pins[name].until, until)
            return True
        own = sum(pin.tenant_id == message.tenant_id for pin in self._pins.values())
        num_bytes = ref.num_bytes + sum(pin.num_bytes for pin in self._pins.values())
        if own >= MAX_PINS or num_bytes > self._max_pinned_bytes:
            return False
        self._pins[name] = _Pin(message.tenant_id, ref.num_bytes, until)
        return True

    def _is_kept(self, name: str) -> bool:
        """Return whether the adapter's files stay for as long as they have to."""
        return name not in self._pins or self._pins[name].is_held

    def _unpin(self, name: str) -> None:
        pin = self._pins.pop(name)
        if pin.is_held:
            self._adapters.release(name.removesuffix(ORIGINAL))

    def _send_pins(self) -> None:
        """Tell the engine which adapters stay, if that has changed or it has let some go."""
        held = tuple((pin.tenant_id, name) for name, pin in self._pins.items() if pin.is_held)
        pins = Pin(held)
        if pins != self._sent_pins or self._adapters.has_let_go(name for _, name in held):
            self._sent_pins = pins
            self._send(pins)


def _is_sane(message: ControlMessage, ref: AdapterRef) -> bool:
    """Return whether the fields of a prefetch have the types and ranges that they must have."""
    return (
        isinstance(ref.digest, str)
        and DIGEST.fullmatch(ref.digest) is not None
        and isinstance(ref.config_key, str)
        and isinstance(ref.tensors_key, str)
        and type(ref.num_bytes) is int
        and ref.num_bytes >= 0
        and message.tier in (Tier.GPU, Tier.HOST)
        and isinstance(message.tenant_id, str)
        and type(message.pin_s) in (int, float)
    )
