"""Computes how many pages the arena has: as configured, or on a GPU what fits."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.errors import OutOfMemory
from engine.model.config import ModelConfig

CPU_ARENA_BYTES = 1 << 30
# What drawing a token needs per logit at its peak: the row in fp32, scaled, as probabilities and
# their sums in fp64, and as log-probabilities.
_SAMPLING_BYTES = 40
# Share of the card for memory that a profile run does not show: blocks of the caching allocator
# that fit no later request, libraries that load late.
_MARGIN_SHARE = 0.02
#: What this process has outside torch's allocator: CUDA's context, kernels, graphs. Counted high,
#: so that it is not mistaken for memory of others.
_CONTEXT_BYTES = 2 << 30


def arena_pages(
    config: EngineConfig, model: ModelConfig, profile_run: Callable[[torch.Tensor], int]
) -> int:
    """Return the number of pages of the arena.

    profile_run  runs the widest step over an arena of one page, leaving nothing behind, and
                 returns the bytes that the graphs take beyond those that it recorded; called on a
                 GPU alone, when the config does not say how large the arena is

    Raises ValueError when the config's arena has no page, OutOfMemory when less is left than one
    request of the longest context needs.
    """
    page_bytes = config.page_bytes(model)
    if config.arena_bytes is not None:
        if config.arena_bytes < page_bytes:
            raise ValueError(f"arena_bytes is {config.arena_bytes}; one page has {page_bytes}")
        return config.arena_bytes // page_bytes
    if config.is_cpu:
        return max(1, CPU_ARENA_BYTES // page_bytes)
    rows = min(config.max_running, config.max_step_tokens)
    left = _left_after(config, model, profile_run) - _SAMPLING_BYTES * rows * model.vocab_size
    fewest = -(-config.context_limit(model) // config.page_size)
    if left < fewest * page_bytes:
        raise OutOfMemory(
            f"{config.device} has {_gb(left)} left for KV and adapters, where one request of "
            f"{config.context_limit(model)} tokens needs {_gb(fewest * page_bytes)}: set a smaller "
            "max_context, max_step_tokens or max_running"
        )
    return left // page_bytes


def _left_after(
    config: EngineConfig, model: ModelConfig, profile_run: Callable[[torch.Tensor], int]
) -> int:
    """Return the bytes of the device that everything but the arena leaves free."""
    layout = config.page_layout(model)
    dtype = torch.float32 if config.dtype_name == "float32" else torch.bfloat16
    torch.cuda.empty_cache()
    page = torch.zeros(1, layout.page_elems, dtype=dtype, device=config.device)
    other_graphs = profile_run(page)
    torch.cuda.synchronize(page.device)
    # What the allocator holds is the most that was ever in use, not what is in use now.
    free, total = torch.cuda.mem_get_info(page.device)
    held = torch.cuda.memory_reserved(page.device)
    gc.collect()
    torch.cuda.empty_cache()
    # Other processes may have some of what is reserved for them: a trainer that runs already.
    others = max(0, total - free - held - _CONTEXT_BYTES)
    reserved = max(0.0, config.reserved_share * total - others)
    return int(free - other_graphs - _MARGIN_SHARE * total - reserved)


def _gb(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / 1e9:.1f} GB"
