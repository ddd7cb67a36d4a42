"""DashStats: the state of a DashEngine and its adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.dash.adapters import NamedAdapter
from engine.engine import Engine
from engine.stats import DraftCounts, PreemptionCause

_STATES = {"disk": "on disk", "loading": "loading", "host": "ready", "resident": "resident"}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DashStats:
    """A DashEngine at one moment; prints as a summary.

    adapters         name -> "loading", "ready" (in host memory), "resident" (in the arena), "on
                     disk" (there was no room in host memory; it is read when it is needed) or
                     "failed: " and why the last attempt to read it failed
    running, waiting requests; at most max_running run at once
    max_step_tokens  the most tokens of one step
    num_steps, num_generated   steps and generated tokens so far
    tokens_per_step  tokens that a request got from a step, on average: more than 1 with drafts
    drafts           drafted tokens so far by source, and those that were right
    preemptions      how many times running requests lost their pages so far, by cause
    arena_bytes      the whole arena; in it, kv_bytes belong to running requests, adapter_bytes to
                     adapters, cached_bytes to prefixes that requests may reuse
    """

    adapters: Mapping[str, str]
    running: int
    waiting: int
    max_running: int
    max_step_tokens: int
    num_steps: int
    num_generated: int
    preemptions: Mapping[PreemptionCause, int]
    arena_bytes: int
    kv_bytes: int
    adapter_bytes: int
    cached_bytes: int
    tokens_per_step: float = 1.0
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)

    @property
    def num_adapters(self) -> int:
        return len(self.adapters)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all causes."""
        return sum(self.preemptions.values())

    def __str__(self) -> str:
        kinds = Counter(state.partition(":")[0] for state in self.adapters.values())
        split = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        parts = ", ".join(
            f"{name} {_size(size)}"
            for name, size in (
                ("KV", self.kv_bytes),
                ("adapters", self.adapter_bytes),
                ("cached prefixes", self.cached_bytes),
            )
        )
        lines = [
            f"{self.num_adapters} adapters" + (f": {split}" if split else ""),
            f"requests: {self.running} running, {self.waiting} waiting, "
            f"{self.num_preemptions} preemptions so far{_causes(self.preemptions)}",
            f"arena of {_size(self.arena_bytes)}: {parts}",
            f"{self.num_steps:,} steps, {self.num_generated:,} tokens",
        ]
        if self.drafts:
            lines[-1] += f", {self.tokens_per_step:.2f} a step and request"
            lines += [f"drafts: {_drafts(self.drafts)}"]
        failed = [f"{n} {s}" for n, s in self.adapters.items() if s.startswith("failed")]
        return "\n".join(lines + failed)

    __repr__ = __str__


def dash_stats(adapters: Sequence[NamedAdapter], engine: Engine, config: EngineConfig) -> DashStats:
    """Make the statistics, with adapters' names and bytes; runs on the engine's thread."""
    stats = engine.stats()
    page_bytes = config.page_bytes(engine.model)
    return DashStats(
        adapters={adapter.name: _state(adapter, engine) for adapter in adapters},
        running=stats.running,
        waiting=stats.waiting,
        max_running=stats.max_running,
        max_step_tokens=config.max_step_tokens,
        num_steps=stats.step,
        num_generated=stats.num_generated,
        preemptions=stats.preemptions,
        arena_bytes=stats.num_pages * page_bytes,
        kv_bytes=stats.kv_pages * page_bytes,
        adapter_bytes=stats.adapter_pages * page_bytes,
        cached_bytes=stats.cached_pages * page_bytes,
        tokens_per_step=stats.tokens_per_step,
        drafts=stats.drafts,
    )


def _state(adapter: NamedAdapter, engine: Engine) -> str:
    if not adapter.ready.done() or adapter.ready.cancelled():
        return "loading"
    error = adapter.ready.exception()
    if error is not None:
        return f"failed: {error}"
    assert adapter.digest is not None
    status = engine.adapter_status(adapter.digest)
    if status is None:
        return "loading"
    return f"failed: {status.failure}" if status.failure else _STATES[status.tier]


def _causes(preemptions: Mapping[PreemptionCause, int]) -> str:
    """Return for example " (3 pages, 1 overdue)"; empty if there were none."""
    causes = ", ".join(f"{count} {cause}" for cause, count in preemptions.items() if count)
    return f" ({causes})" if causes else ""


def _drafts(drafts: Mapping[str, DraftCounts]) -> str:
    """Return for example "forced 12 of 12 right, lookup 3 of 9 right"."""
    return ", ".join(
        f"{source} {own.accepted:,} of {own.drafted:,} right" for source, own in drafts.items()
    )


def _size(num_bytes: int) -> str:
    """Return for example "1.5 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
