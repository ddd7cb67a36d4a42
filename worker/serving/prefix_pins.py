"""PrefixPins: keeps the KV of system prompts in the engine's arena for the control plane.

As with `prefetches`, a pin is a lease: whoever wants it asks again before it ends, or lets it go at
once. The constants limit each tenant. The engine bounds the pages, and says what it has computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

from contract.messages.protocol import AdapterRef, ControlMessage
from contract.messages.sampling import MAX_ADAPTERS
from engine.request import KeptPrefix
from engine.text.codec import TextCodec
from worker.engine_process.channel import Command, KeepPrefixes
from worker.errors import Refused
from worker.serving.adapter_cache import DIGEST, NUM_DOWNLOADS, AdapterFetchError
from worker.serving.adapters import Adapters
from worker.serving.engine_commands import prefix_token_ids
from worker.serving.tasks import Tasks

log = logging.getLogger(__name__)

NUM_AT_ONCE = NUM_DOWNLOADS // 4
BUSY_POLL_S = 0.02
#: Largest number of prefixes of one tenant, and of all; largest number of characters of a prefix.
MAX_PREFIXES, MAX_PREFIXES_OF_ALL = 8, 64
MAX_CHARS = 64_000
#: Largest share of the disk for the adapters of prefixes (one tenant's is half of it), and longest
#: time of a pin.
DISK_SHARE = 0.25
MAX_PIN_S = 600.0
#: Seconds until the engine is asked again for prefixes that it does not have.
RETRY_S = 20.0
#: Outcomes of pins, as the labels of a metric.
OUTCOMES = ("kept", "renewed", "let_go", "ended", "refused", "failed")


@dataclass(slots=True, eq=False)
class _Pin:
    """One prefix.

    token_ids    None until its adapters are here
    rendered_on  the day: a chat template may write it
    held         digests of adapters whose files it keeps on the disk
    """

    tenant_id: str
    refs: tuple[AdapterRef, ...]
    system_prompt: str
    until: float
    token_ids: tuple[int, ...] | None = None
    rendered_on: date | None = None
    held: list[str] = field(default_factory=list)


class PrefixPins:
    """Owns the pinned prefixes, by name.

    disk_bytes  the disk's room for adapters; files of those that are here cannot be evicted
    """

    def __init__(
        self,
        adapters: Adapters,
        *,
        codec: TextCodec,
        send: Callable[[Command], None],
        tasks: Tasks,
        disk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adapters, self._codec, self._send = adapters, codec, send
        self._tasks, self._clock = tasks, clock
        self._max_bytes = int(disk_bytes * DISK_SHARE)
        self._pins: dict[str, _Pin] = {}
        self._seats = asyncio.Semaphore(NUM_AT_ONCE)
        self._is_changed = False
        self._sent_at = float("-inf")
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def ask(self, message: ControlMessage) -> None:
        """Pin a prefix, renew it (then without its text), or let it go (for no seconds)."""
        now = self._clock()
        if not _is_sane(message):
            self._refuse(message, "it is not valid")
        elif message.pin_s <= 0:
            self._remove(message.prefix, "let_go")
        elif (pin := self._pins.get(message.prefix)) is not None:
            pin.until = now + min(message.pin_s, MAX_PIN_S)
            self.outcomes["renewed"] += 1
            if pin.token_ids is not None and pin.rendered_on != date.today():
                self._tasks.start(self._render(message.prefix, pin))
        elif not message.system_prompt:
            self._refuse(message, "it is not known")  # its lease has just ended
        elif why := self._excess(message):
            self._refuse(message, why)
        else:
            self._pins[message.prefix] = pin = _Pin(
                tenant_id=message.tenant_id,
                refs=message.adapters,
                system_prompt=message.system_prompt,
                until=now + min(message.pin_s, MAX_PIN_S),
            )
            self._tasks.start(self._bring(message.prefix, pin))

    def tend(self) -> None:
        """End the pins that nobody has asked for again, and tell the engine what has changed."""
        now = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self._remove(name, "ended")
        ready = {name for name, pin in self._pins.items() if pin.token_ids is not None}
        is_lacking = not ready <= set(self._adapters.kept_prefixes)
        if self._is_changed or (is_lacking and now - self._sent_at >= RETRY_S):
            self._is_changed, self._sent_at = False, now
            self._send(KeepPrefixes(tuple(self._kept())))

    def drop(self, digest: str) -> None:
        """Forget a deleted adapter."""
        for name, pin in list(self._pins.items()):
            if any(ref.digest == digest for ref in pin.refs):
                self._remove(name, "let_go")

    def _kept(self) -> list[KeptPrefix]:
        return [
            KeptPrefix(
                name=name,
                tenant_id=pin.tenant_id,
                adapters=self._adapters.parts_of(pin.refs),
                token_ids=pin.token_ids,
            )
            for name, pin in self._pins.items()
            if pin.token_ids is not None
        ]

    def _refuse(self, message: ControlMessage, why: str) -> None:
        self.outcomes["refused"] += 1
        log.info("a prefix is not pinned: %s", why, extra={"tenant_id": message.tenant_id})

    def _excess(self, message: ControlMessage) -> str | None:
        """Return which bound one more prefix would break."""
        own = sum(pin.tenant_id == message.tenant_id for pin in self._pins.values())
        if own >= MAX_PREFIXES or len(self._pins) >= MAX_PREFIXES_OF_ALL:
            return "its tenant, or all, have too many"
        for tenants, most in ((None, self._max_bytes), (message.tenant_id, self._max_bytes // 2)):
            pins = [pin for pin in self._pins.values() if tenants in (None, pin.tenant_id)]
            refs = [*(ref for pin in pins for ref in pin.refs), *message.adapters]
            if sum({ref.digest: ref.num_bytes for ref in refs}.values()) > most:
                return "their adapters would need too much of the disk"
        return None

    def _remove(self, name: str, outcome: str) -> None:
        pin = self._pins.pop(name, None)
        if pin is not None:
            self.outcomes[outcome] += 1
            self._is_changed = True
            self._release(pin)

    def _release(self, pin: _Pin) -> None:
        for digest in pin.held:
            self._adapters.release(digest)
        pin.held = []

    def _is_wanted(self, name: str, pin: _Pin) -> bool:
        return self._pins.get(name) is pin

    async def _bring(self, name: str, pin: _Pin) -> None:
        """Have the prefix's adapters here and its tokens known."""
        try:
            async with self._seats:
                while self._adapters.is_loading and self._is_wanted(name, pin):
                    await asyncio.sleep(BUSY_POLL_S)
                for ref in pin.refs if self._is_wanted(name, pin) else ():
                    await self._adapters.load(ref)
                    pin.held.append(ref.digest)
                await self._render(name, pin)
        except (AdapterFetchError, Refused) as error:
            log.warning("a prefix cannot be pinned: %s", error)
            self._fail(name, pin)
        except Exception:  # such as a full disk: requests continue
            log.exception("a prefix cannot be pinned")
            self._fail(name, pin)
        if not self._is_wanted(name, pin):
            self._release(pin)

    def _fail(self, name: str, pin: _Pin) -> None:
        if self._is_wanted(name, pin):
            self._remove(name, "failed")

    async def _render(self, name: str, pin: _Pin) -> None:
        if self._is_wanted(name, pin):
            today, is_new = date.today(), pin.token_ids is None
            found = await asyncio.to_thread(prefix_token_ids, pin.system_prompt, self._codec)
            self._is_changed |= self._is_wanted(name, pin)
            self.outcomes["kept"] += is_new and self._is_wanted(name, pin)
            pin.token_ids, pin.rendered_on = tuple(found), today


def _is_sane(message: ControlMessage) -> bool:
    """Return whether the fields of a pin have the types and ranges that they must have."""
    return (
        isinstance(message.prefix, str)
        and 0 < len(message.prefix) <= 64
        and isinstance(message.tenant_id, str)
        and isinstance(message.system_prompt, str)
        and len(message.system_prompt) <= MAX_CHARS
        and type(message.pin_s) in (int, float)
        and math.isfinite(message.pin_s)
        and isinstance(message.adapters, tuple)
        and len(message.adapters) <= MAX_ADAPTERS
        and all(map(_is_ref, message.adapters))
    )


def _is_ref(ref: object) -> bool:
    return (
        isinstance(ref, AdapterRef)
        and isinstance(ref.digest, str)
        and DIGEST.fullmatch(ref.digest) is not None
        and isinstance(ref.config_key, str)
        and isinstance(ref.tensors_key, str)
        and type(ref.num_bytes) is int
        and ref.num_bytes >= 0
        and type(ref.weight) in (int, float)
        and math.isfinite(ref.weight)
    )
