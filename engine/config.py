"""EngineConfig: the settings of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UnsupportedModel
from engine.memory.eviction import ReloadCosts
from engine.model.config import ModelConfig
from engine.scheduling.page_tables import STATES_HELD
from engine.scheduling.waiting_queue import SchedulerLimits
from kernels import PageLayout
from kernels.kv_pages import KEYS_READ_TOGETHER


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine.

    model_dir             a Hugging Face folder: config.json, safetensors, tokenizer files
    device                "cpu" or "cuda[:n]"
    dtype                 "float32" or "bfloat16"; None: float32 on a CPU, bfloat16 on a GPU
    base_precision        "fp8": linears that the checkpoint has in 16 or 32 bits are quantised as
                          they are loaded; None: the base is as the checkpoint has it
    kv_precision          "fp8": keys and values are kept in E4M3, in half of the memory; None: in
                          `dtype`
    adapter_precision     "fp8": adapters' matrices are kept in E4M3 with a scale each, in half of
                          the memory; None: in `dtype`
    precision_prompts     token ids of prompts on which a quantised base, and keys and values, are
                          compared with the base as it was while it is loaded
                          (`EngineStats.precision`); empty: they are not
    arena_bytes           memory of the page arena (docs/memory.md), KV and adapters together;
                          None: on a CPU 1 GiB, on a GPU what weights, graphs and the widest step
                          leave free, measured when the engine starts
    reserved_share        of the GPU's memory, what the arena leaves to other processes, a trainer
                          for instance; what they have when the engine starts counts
    max_adapter_bytes     the most of the arena that adapters may hold; None: all
    min_kv_bytes          what adapters always leave to KV
    min_adapter_bytes     what KV always leaves to adapters
    host_cache_bytes      host memory for adapters, pinned on a GPU: those read from disk, and those
                          that left the arena; taken at the start
    max_running           requests that may hold pages at a time
    max_adapters          distinct adapters that requests may be running with at a time; None: any
    max_step_tokens       tokens of one step, decodes and prefill chunks together
    max_context           None: the model's max_position_embeddings
    page_size             tokens per page
    prefix_cache          keep the KV of full pages, for requests that begin with the same tokens
    pin_share             of the arena's pages, what pinned prefixes may take at most
    adapter_pin_share     of the arena's pages, what pinned adapters may take at most
    num_threads           torch's CPU threads; None: leave them
    loader_threads        adapters read from disk at a time
    max_prefetch          missing adapters of waiting requests that are loaded ahead of them
    load_timeout_s        reading an adapter for longer counts as failed
    use_triton            None: on a GPU; True on a CPU needs Triton's interpreter, for tests
    capture_graphs        record the GPU's decode graphs at the start, not when first needed
    max_skips             how often a waiting request may be overtaken by requests of its priority
                          that came later, because its adapter lacks room or theirs is in use
                          already; then none of them is admitted before it
    max_wait_s            seconds that an interactive request waits at most, in all, for requests
                          that came later, whatever their adapter or priority; then they give way
    max_batch_wait_s      the same for a batch request
    speculation           draft tokens and verify them in one pass: the same answers in fewer
                          steps; on a GPU in small batches only (docs/speculation.md)
    lends_weights         adapters may be trained over the weights that the engine holds
                          (engine/beside). A GPU has one copy; a CPU keeps the weights as they were
                          read, beside those that its products need
    """

    model_dir: Path
    device: str = "cpu"
    dtype: str | None = None
    base_precision: str | None = None
    kv_precision: str | None = None
    adapter_precision: str | None = None
    precision_prompts: tuple[tuple[int, ...], ...] = ()
    arena_bytes: int | None = None
    reserved_share: float = 0.0
    max_adapter_bytes: int | None = None
    min_kv_bytes: int = 0
    min_adapter_bytes: int = 0
    host_cache_bytes: int = 256 << 20
    max_running: int = 64
    max_adapters: int | None = None
    max_step_tokens: int = 512
    max_context: int | None = None
    page_size: int = 16
    prefix_cache: bool = True
    pin_share: float = 0.25
    adapter_pin_share: float = 0.25
    num_threads: int | None = None
    loader_threads: int = 2
    max_prefetch: int = 16
    load_timeout_s: float = 60.0
    use_triton: bool | None = None
    capture_graphs: bool = True
    max_skips: int = 64
    max_wait_s: float = 5.0
    max_batch_wait_s: float = 120.0
    speculation: bool = False
    lends_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("pin_share", "adapter_pin_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, not from 0 to 1")
        if not 0.0 <= self.reserved_share < 1.0:
            raise ValueError(f"reserved_share is {self.reserved_share}, not from 0 to below 1")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, not float32 or bfloat16")
        for name in ("base_precision", "kv_precision", "adapter_precision"):
            if getattr(self, name) not in (None, "fp8"):
                raise ValueError(f"{name} is {getattr(self, name)!r}, not fp8 or None")
        for name in (
            "max_running", "max_step_tokens", "page_size", "loader_threads", "max_prefetch",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("host_cache_bytes", "min_kv_bytes", "min_adapter_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")

    @property
    def scheduler_limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_adapters=self.max_adapters,
            max_skips=self.max_skips,
            max_wait_s=self.max_wait_s,
            max_batch_wait_s=self.max_batch_wait_s,
        )

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def runs_triton(self) -> bool:
        return not self.is_cpu if self.use_triton is None else self.use_triton

    @property
    def dtype_name(self) -> str:
        return self.dtype or ("float32" if self.is_cpu else "bfloat16")

    @property
    def bytes_per_element(self) -> int:
        return 4 if self.dtype_name == "float32" else 2

    @property
    def max_drafted_rows(self) -> int | None:
        """Return the rows of a decode with drafts that a GPU has graphs for; None: no drafts."""
        if not self.speculation:
            return None
        return max(self.max_running, min(3 * self.max_running + 16, self.max_running + 128, 512))

    def check_model(self, model: ModelConfig) -> None:
        """Raise UnsupportedModel for a setting that is not done for what the layers have."""
        what, has_delta = model.plan.trained_on_a_cpu_alone, model.plan.delta is not None
        has_shapes = bool(model.plan.shapes)
        refused = {
            "device": bool(model.plan.on_a_cpu_alone)
            and (self.runs_triton or (has_shapes and not self.is_cpu)),
            "base_precision": bool(what) and self.base_precision is not None,
            "speculation": has_delta and self.speculation,
            "kv_precision": (has_delta or has_shapes) and self.kv_precision is not None,
            "dtype": has_shapes and self.dtype_name != "float32",
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise UnsupportedModel(
                    f"the model has {what}, for which {name} {getattr(self, name)!r} is not "
                    "supported: leave it at its default",
                    param=name,
                )

    def page_layout(self, model: ModelConfig) -> PageLayout:
        """Return the layout of one page: the KV of `page_size` tokens over all layers."""
        num_layers, num_kv_heads, head_dim = model.kv_page
        layout = PageLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=self.page_size,
            per_element=self.bytes_per_element if self.kv_precision == "fp8" else 1,
            tile_per_element=self.bytes_per_element if self.adapter_precision == "fp8" else 1,
        )
        widest = model.widest
        if layout.page_elems < widest:
            raise UnsupportedModel(
                f"a page of {self.page_size} tokens has {layout.page_elems} elements and cannot "
                f"hold one rank row of {widest}: use page_size "
                f"{math.ceil(self.page_size * widest / layout.page_elems)} or more",
                param="page_size",
            )
        return layout

    def page_bytes(self, model: ModelConfig) -> int:
        return self.page_layout(model).page_elems * self.bytes_per_element

    def state_pages(self, model: ModelConfig) -> int:
        """Return the pages that hold what the gated delta nets keep of a sequence, in fp32."""
        delta = model.plan.delta
        if delta is None:
            return 0
        num_bytes = 4 * delta.state_size * len(model.plan.delta_layers)
        return math.ceil(num_bytes / self.page_bytes(model))

    def page_limits(self, model: ModelConfig, num_pages: int) -> tuple[int, int]:
        """Return the most pages of an arena of `num_pages` that (KV, adapters) may have.

        Raises ValueError when the minima leave one of them nothing.
        """
        page_bytes = self.page_bytes(model)
        max_kv = num_pages + self.min_adapter_bytes // -page_bytes
        max_adapter = num_pages + self.min_kv_bytes // -page_bytes
        if self.max_adapter_bytes is not None:
            max_adapter = min(max_adapter, self.max_adapter_bytes // page_bytes)
        if max_kv < 1 or max_adapter < 0:
            raise ValueError(
                f"min_kv_bytes is {self.min_kv_bytes} and min_adapter_bytes "
                f"{self.min_adapter_bytes}; the arena has {num_pages * page_bytes} bytes"
            )
        return max_kv, max_adapter

    def reload_costs(self, model: ModelConfig) -> ReloadCosts:
        """Estimate the reload cost of a page of each kind, for the order of eviction."""
        return ReloadCosts.estimate(
            page_bytes=self.page_bytes(model),
            num_params=sum(a * b for i in range(model.num_layers) for a, b in model.widths(i)),
            page_size=self.page_size,
            is_cpu=self.is_cpu,
        )

    def kv_window(self, model: ModelConfig) -> int | None:
        """Return how many tokens back, the new one included, KV may be read; None: all."""
        windows = [window for window in model.plan.windows if window is not None]
        if not windows or len(windows) < model.num_layers:
            return None
        return max(windows) + (KEYS_READ_TOGETHER - 1 if self.runs_triton else 0)

    def context_limit(self, model: ModelConfig) -> int:
        return min(self.max_context or model.max_positions, model.max_positions)

    def position_limit(self, model: ModelConfig, num_pages: int) -> int:
        """Return how many positions tokens can have: the context, limited by the pages for KV.

        Raises ValueError as `page_limits` does.
        """
        max_kv, _ = self.page_limits(model, num_pages)
        limit = self.context_limit(model)
        if self.kv_window(model) is not None:  # pages before the window are given back
            return limit
        num_states = self.state_pages(model) * STATES_HELD
        if num_states >= max_kv:
            raise ValueError(
                f"the arena has {max_kv} pages for KV, and a sequence's states need {num_states}: "
                "set a larger arena_bytes"
            )
        # A sequence may hold fewer states than are reckoned with, and its tokens the more pages.
        return min(limit, max_kv * self.page_size)
