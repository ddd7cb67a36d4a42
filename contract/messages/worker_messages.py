"""ControlMessage and Heartbeat: orders to a worker, and its reports."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable
from typing import Any, Self

from contract.messages.message import AdapterRef, Message

PROTOCOL_VERSION = 1


class Control(enum.StrEnum):
    CANCEL = "cancel"
    DRAIN = "drain"
    RESUME = "resume"  # end a drain whose requests still run
    WAKE = "poke"  # there is work to pull
    FORGET = "forget"  # an adapter was deleted: `digest`
    PREFETCH = "prefetch"  # load `adapter` into `tier` before a request needs it
    PIN_PREFIX = "pin_prefix"  # keep the KV of `system_prompt` with `adapters`, as `prefix`


class Tier(enum.StrEnum):
    """The place where a worker has an adapter; the fastest place is first."""

    GPU = "gpu"  # in the arena, also on a CPU
    HOST = "host"
    DISK = "disk"
    STORE = "store"  # the worker does not have it; "cold" to people

    @property
    def rank(self) -> int:
        """Return 0 for the fastest tier, 1 for the next, and so on."""
        return list(Tier).index(self)


#: Largest number of digests of host memory, and of the disk, in a heartbeat (the newest), and the
#: length to which each digest is cut.
MAX_TOLD = 512
TOLD_CHARS = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlMessage(Message):
    action: str  # Control
    request_id: str | None = None
    digest: str | None = None
    adapter: AdapterRef | None = None
    tier: str = Tier.GPU  # or HOST
    tenant_id: str = ""  # the tenant whose quota a prefetch counts in
    pin_s: float = 0.0  # seconds that the adapter stays on the GPU, unless it is requested again
    prefix: str = ""  # names one tenant's adapters, weights and system prompt
    adapters: tuple[AdapterRef, ...] = ()  # adapters of the prefix
    system_prompt: str = ""  # empty: the worker's heartbeat already has the prefix

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        if isinstance(adapter := fields.get("adapter"), dict):
            fields = {**fields, "adapter": AdapterRef.from_dict(adapter)}
        if isinstance(adapters := fields.get("adapters"), list):
            fields = {**fields, "adapters": tuple(map(AdapterRef.from_dict, adapters))}
        return super(ControlMessage, cls).from_dict(fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    worker_id: str
    boot_id: str  # new at every start
    pool: str
    base_model: str
    base_revision: str
    device: str
    version: int = PROTOCOL_VERSION
    step: int = 0  # engine steps so far; an engine with requests but without new steps is stuck
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    free_pages: int = 0
    num_pages: int = 0
    resident_digests: tuple[str, ...] = ()
    pinned_digests: tuple[str, ...] = ()  # those of gpu_digests that are pinned
    kept_prefixes: tuple[str, ...] = ()  # names of prefixes whose KV is computed and kept
    host_digests: tuple[str, ...] = ()  # shortened by `told`
    disk_digests: tuple[str, ...] = ()
    tokens_per_s: float = 0.0
    draining: bool = False
    loading: bool = False  # the engine is not ready, and nothing is pulled yet
    started_at: float = 0.0
    # {"weights", "kv", "compared_with", "num_tokens", "kinds": {kind: {"kl", "agreement",
    # "logit_error"}}}: engine.stats.Precision, without what is empty
    precision: dict[str, Any] | None = None
    # actions of `Control` that it understands
    controls: tuple[str, ...] = ()

    def tier_of(self, digest: str) -> Tier:
        """Return the fastest tier in which this worker has an adapter."""
        return _tier(digest, self.resident_digests, self.host_digests, self.disk_digests)

    def tiers_of(self, digests: Iterable[str]) -> dict[str, Tier]:
        """Return the fastest tier of each of many adapters, by digest."""
        where = set(self.resident_digests), set(self.host_digests), set(self.disk_digests)
        return {digest: _tier(digest, *where) for digest in digests}


def _tier(digest: str, gpu: Collection[str], host: Collection[str], disk: Collection[str]) -> Tier:
    if digest in gpu:
        return Tier.GPU
    short = digest[:TOLD_CHARS]
    if short in host:
        return Tier.HOST
    return Tier.DISK if short in disk else Tier.STORE


def told(digests: tuple[str, ...]) -> tuple[str, ...]:
    """Return the newest digests, which are the last ones, in the form of a heartbeat."""
    return tuple(digest[:TOLD_CHARS] for digest in digests[-MAX_TOLD:])
