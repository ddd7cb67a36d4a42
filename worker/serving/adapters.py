"""Adapters: brings adapters to the disk and the engine, for requests; knows where each one is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from contract.messages.protocol import AdapterRef, Tier
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
        self._registered: set[str] = set()  # digests that the engine knows
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

    def tier_of(self, digest: str) -> Tier:
        """Return where an adapter is, as the engine last said."""
        if digest in self._stats.resident_digests:
            return Tier.GPU
        if digest in self._stats.host_digests:
            return Tier.HOST
        return Tier.DISK if digest in self._cache else Tier.STORE

    def has_let_go(self, digests: Iterable[str]) -> bool:
        """Return whether the engine no longer keeps an adapter that is to be pinned."""
        return any(
            digest in self._stats.resident_digests and digest not in self._stats.pinned_digests
            for digest in digests
        )

    def on_disk_alone(self, count: int) -> tuple[str, ...]:
        """Return at most `count` adapters on the disk and in no memory, the newest last."""
        in_memory = {*self._stats.resident_digests, *self._stats.host_digests}
        alone = (digest for digest in self._cache.newest_first() if digest not in in_memory)
        return tuple(itertools.islice(alone, count))[::-1]

    async def load(self, ref: AdapterRef) -> None:
        """Bring an adapter to the disk, kept there until `release`, and tell the engine of it.

        Raises AdapterFetchError.
        """
        folder = await self._cache.acquire(ref)
        if ref.digest not in self._registered:
            self._registered.add(ref.digest)
            self._send(Register(ref.digest, str(folder)))

    async def load_for_request(self, ref: AdapterRef) -> Tier:
        """Do as `load`, before any prefetch begins; return where the adapter was found."""
        tier = self.tier_of(ref.digest)
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
        if digest in self._registered:
            self._registered.discard(digest)
            self._send(Unregister(digest))
