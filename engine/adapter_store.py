"""make_store: the adapter store over a runner's arena, as an engine's configuration has it."""

from __future__ import annotations

from collections.abc import Callable

from engine.adapters.files import AdapterReader, DigestOf
from engine.adapters.host_memory import HostMemory
from engine.adapters.loader import LoadLimits
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.execution.runner import ModelRunner
from engine.memory.page_pool import PagePool
from engine.memory.prefix_cache import PrefixCache
from engine.model.config import ModelConfig


def make_store(
    config: EngineConfig,
    runner: ModelRunner,
    model: ModelConfig,
    pool: PagePool,
    prefixes: PrefixCache,
    clock: Callable[[], float],
    digest_of: DigestOf | None,
) -> AdapterStore:
    """Return a store that reads adapters into the runner's arena; no adapter is registered yet."""
    layout, has_heads = config.page_layout(model), runner.draft_heads is not None
    return AdapterStore(
        reader=AdapterReader(
            model,
            layout,
            runner.base,
            digest_of,
            reads_draft_heads=has_heads,
            serves_experts=not config.runs_triton,
        ),
        pool=pool,
        prefixes=prefixes,
        arena=runner.arena,
        host=HostMemory(runner.arena, config.host_cache_bytes),
        costs=config.reload_costs(model),
        limits=LoadLimits(
            num_threads=config.loader_threads,
            max_prefetch=config.max_prefetch,
            timeout_s=config.load_timeout_s,
            max_pinned=int(config.adapter_pin_share * runner.arena.shape[0]),
        ),
        clock=clock,
    )
