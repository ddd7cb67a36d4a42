"""EngineStats and AdapterStatus: the state of an engine. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import AdapterError


class PreemptionCause(enum.StrEnum):
    """Why a running request lost its pages.

    PAGES     it or a request of a higher rank needed a page, and none was left
    PRIORITY  it is batch work, and an interactive request needed its room
    OVERDUE   a request that arrived earlier had waited for `max_wait_s`
    """

    PAGES = "pages"
    PRIORITY = "priority"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Where one adapter is.

    tier     "disk", "loading" (to host memory), "host" or "resident" (in the arena)
    failure  why the last attempt to load it failed; None: there was none, or it succeeded
    """

    tier: Literal["disk", "loading", "host", "resident"]
    failure: AdapterError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The state of an engine between two steps.

    step                steps so far; if it does not grow while requests run, the engine is stuck
    running, waiting    requests; at most max_running run at once
    kv_pages            pages of running requests
    adapter_pages       pages of adapters; all other pages are free or pinned
    pinned_pages        pages that pins hold, also if requests read them; not part of kv_pages
    cached_pages        free pages with prefixes that requests may reuse
    resident_digests    adapters in the arena, least recently used first
    num_adapters        registered adapters
    num_generated       generated tokens so far
    preemptions         how many times running requests lost their pages so far, by cause
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    kv_pages: int = 0
    pinned_pages: int = 0
    adapter_pages: int = 0
    resident_digests: tuple[str, ...] = ()
    num_adapters: int = 0
    num_generated: int = 0
    preemptions: Mapping[PreemptionCause, int] = field(default_factory=dict)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all causes."""
        return sum(self.preemptions.values())
