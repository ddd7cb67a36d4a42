"""The order of eviction, common to idle prefixes and idle adapters. No torch here.

Both lie in the same arena, so one measure serves both. A page that stays saves the time to reload
it, times the rate of its use; the rate is estimated as one use per time that the page has been
idle. Source: GreedyDual-Size (Cao and Irani, USITS'97) with the age in place of its inflation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ReloadCosts:
    """The seconds that reloading a page takes, by where its content comes from.

    host    copied from host memory
    disk    read, hashed, packed and copied
    prefix  computed: 16 tokens
    """

    host: float
    disk: float
    prefix: float

    # Fixed part of the seconds to reload an adapter: its copies are queued; its files are opened
    # and parsed.
    HOST_S: ClassVar[float] = 2e-4
    DISK_S: ClassVar[float] = 5e-3

    @classmethod
    def estimate(
        cls, *, page_bytes: int, num_params: int, page_size: int, is_cpu: bool
    ) -> ReloadCosts:
        """Estimate for usual hardware; only the ratios between the three matter."""
        host_bytes_s, disk_bytes_s = (5e9, 1e9) if is_cpu else (40e9, 1.5e9)
        flop_s = 1e11 if is_cpu else 5e14
        return cls(
            host=page_bytes / host_bytes_s,
            disk=page_bytes / disk_bytes_s + page_bytes / host_bytes_s,
            prefix=2 * num_params * page_size / flop_s,
        )

    def adapter(self, num_pages: int, *, is_in_host: bool) -> float:
        """Return the seconds to reload an evicted adapter of `num_pages` pages."""
        if is_in_host:
            return self.HOST_S + num_pages * self.host
        return self.DISK_S + num_pages * self.disk


@dataclass(frozen=True, slots=True)
class EvictionCandidate(Generic[T_co]):
    """Pages that are evicted together.

    owner       the adapter, or the page of a prefix
    num_pages   1 or more
    reload_s    seconds to reload them
    last_use    when they were last read, in steps of the engine
    is_pinned   they are never evicted
    """

    owner: T_co
    num_pages: int
    reload_s: float
    last_use: int
    is_pinned: bool = False


def retention_value(candidate: EvictionCandidate[T], now: int) -> float:
    """Return the seconds per step that keeping one of its pages saves; infinite if pinned."""
    if candidate.is_pinned:
        return math.inf
    return candidate.reload_s / candidate.num_pages / (now - candidate.last_use + 1)


def eviction_order(
    candidates: Iterable[EvictionCandidate[T]], now: int
) -> list[EvictionCandidate[T]]:
    """Sort what may be evicted, the first to go first, and leave out what is pinned.

    Of equal values the least recently used goes first, then the one of fewer pages.
    """
    evictable = [candidate for candidate in candidates if not candidate.is_pinned]
    return sorted(evictable, key=lambda c: (retention_value(c, now), c.last_use, c.num_pages))
