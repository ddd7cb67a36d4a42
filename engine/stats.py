"""EngineStats and AdapterStatus: the state of an engine. No torch here."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import AdapterError


class PreemptionCause(enum.StrEnum):
    """Why a running request lost its pages.

    PAGES     it or a request of a higher rank needed a page, and none was left
    PRIORITY  it is batch work, and an interactive request needed its room
    OVERDUE   a request that arrived earlier had waited for `max_wait_s`
    GUESS     a step over a guessed token was dropped, and had changed the request's state
    """

    PAGES = "pages"
    PRIORITY = "priority"
    OVERDUE = "overdue"
    GUESS = "guess"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """The location of one adapter.

    tier     "disk", "loading" (to host memory), "host" or "resident" (in the arena)
    failure  why the last attempt to load it failed; None: there was none, or it succeeded
    """

    tier: Literal["disk", "loading", "host", "resident"]
    failure: AdapterError | None = None


@dataclass(slots=True)
class Distribution:
    """Numbers of values by range, in Prometheus's form.

    bounds  upper bounds, ascending; each belongs to its range
    counts  values in each range, and above the last bound
    total   sum of all values
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Distribution:
        return Distribution(self.bounds, list(self.counts), self.total)


class StepCounts:
    """The engine's record of each step: its rows, and the time of the call that launched it."""

    def __init__(self) -> None:
        self.rows = Distribution((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
        self.seconds = Distribution(
            (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
        )

    def add(self, rows: int, seconds: float) -> None:
        self.rows.add(rows)
        self.seconds.add(seconds)


@dataclass(slots=True)
class LoadCounts:
    """Loads of adapters to one tier so far, the seconds they took, and those that failed."""

    loads: int = 0
    seconds: float = 0.0
    failures: int = 0

    def add(self, seconds: float) -> float:
        """Count a load that took `seconds`. -> the seconds."""
        self.loads += 1
        self.seconds += max(0.0, seconds)
        return max(0.0, seconds)


@dataclass(slots=True)
class DraftCounts:
    """Drafted tokens of one source so far, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0

    def add(self, *, is_accepted: bool) -> None:
        self.drafted += 1
        self.accepted += is_accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The distance of logits from the reference's.

    kl           Kullback-Leibler divergence in nats per token, of these from the reference
    agreement    share of tokens after which both find the same token the likeliest
    logit_error  the largest difference of two logits
    """

    kl: float
    agreement: float
    logit_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The precision in which an engine serves, and what it changes.

    weights        of the base's linears: "fp8", "int4", "bfloat16", "float32"
    kv             of keys and values: "fp8" or as for weights
    adapters       of A and B of adapters: likewise
    compared_with  "checkpoint": with its weights dequantised; else the type of the weights before
                   they were quantised; empty: nothing was compared
    kinds          "all", and "attention", "mlp", "kv": only this kind quantised
    """

    weights: str = ""
    kv: str = ""
    adapters: str = ""
    compared_with: str = ""
    num_tokens: int = 0
    kinds: Mapping[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The state of an engine between two steps.

    step                steps so far; if it does not grow while requests run, the engine is stuck
    running, waiting    requests; at most max_running run at once
    kv_pages            pages of running requests
    adapter_pages       pages of adapters; all other pages are free or pinned
    pinned_pages        pages that pins hold, also if requests read them; not part of kv_pages
    cached_pages        free pages with prefixes that requests may reuse
    lent_pages          pages that a trainer has (`engine.beside`)
    trained_seconds     that the device spent on training beside requests so far
    resident_digests    adapters in the arena, least recently used first
    host_digests        adapters in host memory, the newest last
    pinned_digests      adapters that stay in the arena also while no request uses them
    kept_prefixes       names of the prefixes that `Engine.keep_prefixes` has and that are computed
    num_adapters        registered adapters
    num_generated       generated tokens so far
    preemptions         how many times running requests lost their pages so far, by cause
    step_rows           rows of each step so far
    step_seconds        time of each step so far
    adapter_loads       loads so far by tier: "host" memory, from files, and "arena", from there
    drafts              drafted tokens so far by source; empty if the engine drafts none
    precision           of weights, keys and values
    uses_draft_heads    whether adapters' draft heads are used; if not, they take no pages
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
    lent_pages: int = 0
    trained_seconds: float = 0.0
    resident_digests: tuple[str, ...] = ()
    host_digests: tuple[str, ...] = ()
    pinned_digests: tuple[str, ...] = ()
    kept_prefixes: tuple[str, ...] = ()
    num_adapters: int = 0
    num_generated: int = 0
    preemptions: Mapping[PreemptionCause, int] = field(default_factory=dict)
    step_rows: Distribution | None = None
    step_seconds: Distribution | None = None
    adapter_loads: Mapping[str, LoadCounts] = field(default_factory=dict)
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    precision: Precision = field(default_factory=Precision)
    uses_draft_heads: bool = False

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a request got from a step in which it got any, on average so far."""
        accepted = sum(counts.accepted for counts in self.drafts.values())
        return self.num_generated / max(1, self.num_generated - accepted)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all causes."""
        return sum(self.preemptions.values())
