"""Adapters: brings adapters to the disk and the engine, for requests; knows where each one is.

The disk has adapters by digest, the engine by name: an engine that keeps adapters in FP8 may have
the original of one, too, under a name of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from contract.messages.protocol import AdapterRef, Tier
from engine.request import ORIGINAL, AdapterPart, digests_of
from engine.stats import EngineStats, LoadCounts
from worker.config import WorkerConfig
from worker.engine_process.channel import Command, Register, Unregister
from worker.serving.adapter_cache import AdapterCache, Fetch


class Adapters:
    """Owns the disk cache, and which of its adapters the engine knows.

    send  sends a command to the engine
    """

    def __init__(
        self, config: WorkerConfig, *, send: Callable[[Command], None], fetch: Fetch
    ) -> None:
        self._send = send
        self._cache = AdapterCache(
            config.adapter_dir,
            max_bytes=config.adapter_cache_bytes,
            base_revision=config.base_revision,
            fetch=fetch,
            on_evict=self._on_evict,
        )
        self._is_fp8 = config.adapter_precision == "fp8"
        self._registered: set[str] = set()  # names that the engine knows
        self._stats = EngineStats()
        self._num_loading = 0

    @property
    def downloads(self) -> LoadCounts:
        """Return how many adapters were brought to the disk so far."""
        return self._cache.downloads

    @property
    def is_loading(self) -> bool:
        """Return whether a request waits for an adapter's files."""
        return self._num_loading > 0

    @property
    def kept_prefixes(self) -> tuple[str, ...]:
        """Return the names of prefixes that stay, as the engine last said."""
        return self._stats.kept_prefixes

    def note_stats(self, stats: EngineStats) -> None:
        """Take in what the engine says of its adapters, up to four times a second."""
        self._stats = stats

    def name_of(self, ref: AdapterRef) -> str:
        """Return the engine's name of an adapter in the precision in which it is to answer."""
        return ref.digest + ORIGINAL if self._is_fp8 and not ref.in_fp8 else ref.digest

    def parts_of(self, refs: Iterable[AdapterRef]) -> tuple[AdapterPart, ...]:
        """Return adapters as the engine's requests have them."""
        return tuple(AdapterPart(digest=self.name_of(ref), weight=ref.weight) for ref in refs)

    def tier_of(self, name: str) -> Tier:
        """Return where an adapter is, as the engine last said."""
        if name in self._stats.resident_digests:
            return Tier.GPU
        if name in self._stats.host_digests:
            return Tier.HOST
        return Tier.DISK if name.removesuffix(ORIGINAL) in self._cache else Tier.STORE

    def has_let_go(self, names: Iterable[str]) -> bool:
        """Return whether the engine no longer keeps an adapter that is to be pinned."""
        return any(
            name in self._stats.resident_digests and name not in self._stats.pinned_digests
            for name in names
        )

    def on_disk_alone(self, count: int) -> tuple[str, ...]:
        """Return at most `count` adapters on the disk and in no memory, the newest last."""
        names = (*self._stats.resident_digests, *self._stats.host_digests)
        in_memory = set(digests_of(names))
        alone = (digest for digest in self._cache.newest_first() if digest not in in_memory)
        return tuple(itertools.islice(alone, count))[::-1]

    async def load(self, ref: AdapterRef) -> None:
        """Bring an adapter to the disk, kept there until `release`, and tell the engine of it.

        Raises AdapterFetchError.
        """
        folder = await self._cache.acquire(ref)
        name = self.name_of(ref)
        if name not in self._registered:
            self._registered.add(name)
            self._send(Register(name, str(folder)))

    async def load_for_request(self, ref: AdapterRef) -> Tier:
        """Do as `load`, before any prefetch begins; return where the adapter was found."""
        tier = self.tier_of(self.name_of(ref))
        self._num_loading += 1
        try:
            await self.load(ref)
        finally:
            self._num_loading -= 1
        return tier

    def release(self, digest: str) -> None:
        """Undo one `load`."""
        self._cache.release(digest)

    def drop(self, digest: str) -> None:
        """Drop a deleted adapter from the disk and the engine once no request uses it."""
        self._cache.drop(digest)

    def _on_evict(self, digest: str) -> None:
        for name in (digest, digest + ORIGINAL):
            if name in self._registered:
                self._registered.discard(name)
                self._send(Unregister(name))
