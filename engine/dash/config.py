"""DashConfig: the settings of a DashEngine."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


_OPTIONAL_COUNTS = ("max_running", "max_step_tokens", "max_context", "num_threads")
# On a GPU: (the most, bytes of the card for each). A step's activations take about 130 KB a token
# of an 8B model, drawing a token 5 MB a request; either stays within some 2% of the card.
_GPU_STEP_TOKENS = (16384, 8 << 20)
_GPU_RUNNING = (512, 256 << 20)
_CPU_STEP_TOKENS, _CPU_RUNNING = 512, 64


def parse_bytes(size: str | int) -> int:
    """Parse "2GB" as 2_000_000_000, "2GiB" as 2_147_483_648; raises ValueError for other text."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is not a size such as 512MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _bytes_or_none(size: str | int | None) -> int | None:
    return None if size is None else parse_bytes(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashConfig:
    """The settings of a DashEngine. Raises ValueError naming the field that is wrong.

    max_concurrent_adapters  distinct adapters that requests may be running with at a time
    adapter_vram_pool        the most memory that adapters take; KV may use what they leave
    kv_pool                  memory reserved for KV. The two pools make one arena. None for both:
                             what the device has left (`EngineConfig.arena_bytes`), shared without
                             limits; None for one: as much as the other. A CPU allocates memory
                             when it is used
    host_cache               host memory for adapters that are not in the arena
    offload_dir              a folder that gets a copy of every registered adapter, so that the
                             source may change or be deleted; None: sources are read when needed
    device, dtype            "cpu" or "cuda[:n]"; "float32" or "bfloat16". None: those of a loaded
                             model, float32 for one of float16; for a folder a CPU, with
                             float32, or bfloat16 on a GPU
    base_precision           "fp8": quantise linears that are not as they are loaded; None: the base
                             is as its folder has it
    kv_precision             "fp8": keep keys and values in E4M3, in half of the memory; None: in
                             `dtype`
    adapter_precision        "fp8": keep adapters' matrices in E4M3 with a scale each, in half of
                             the memory; None: in `dtype`
    max_running              requests that run at a time; the others wait. None: 64 on a CPU, up to
                             512 on a GPU, by its memory
    max_step_tokens          tokens of one step, prompt chunks and new tokens together. More give
                             more tokens a second; fewer give shorter steps, and a smoother stream
                             beside long prompts. None: 512 on a CPU, up to 16,384 on a GPU, by its
                             memory
    max_context              tokens of a prompt and its answer; None: as many as the model allows
    num_threads              torch's CPU threads; None: leave them
    pack_weights             for a loaded model on a CPU in float32: keep a second copy of its
                             matrices, which is faster, most of all on processors not Intel's
    speculation              draft tokens and verify them in one pass: the same answers in fewer
                             steps; on a GPU while few requests run (docs/speculation.md)
    """

    max_concurrent_adapters: int = 128
    adapter_vram_pool: str | int | None = None
    kv_pool: str | int | None = None
    host_cache: str | int = "256MiB"
    offload_dir: str | Path | None = None
    device: str | None = None
    dtype: str | None = None
    base_precision: str | None = None
    kv_precision: str | None = None
    adapter_precision: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_context: int | None = None
    num_threads: int | None = None
    pack_weights: bool = False
    speculation: bool = False

    def __post_init__(self) -> None:
        for name in ("max_concurrent_adapters", *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_COUNTS:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")
        for name in ("adapter_vram_pool", "kv_pool", "host_cache"):
            value = getattr(self, name)
            if value is None and name != "host_cache":
                continue
            try:
                is_size = not isinstance(value, bool) and parse_bytes(value) > 0
            except (TypeError, ValueError):
                is_size = False
            if not is_size:
                raise ValueError(f"{name} is {value!r}, not a size such as 512MB or 2GiB")
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", str(self.device)):
            raise ValueError(f"device is {self.device!r}, not cpu, cuda or cuda:n")
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, not float32 or bfloat16")
        for name in ("base_precision", "kv_precision", "adapter_precision"):
            if getattr(self, name) not in (None, "fp8"):
                raise ValueError(f"{name} is {getattr(self, name)!r}, not fp8 or None")

    def engine_config(
        self, model_dir: Path, device: str | None = None, dtype: str | None = None
    ) -> EngineConfig:
        """Make the engine's config.

        device, dtype  a loaded model's; raises ValueError when the config asks for others
        """
        for name, wanted, given in (("device", self.device, device), ("dtype", self.dtype, dtype)):
            if given is not None and wanted not in (None, given, given.partition(":")[0]):
                raise ValueError(f"{name} is {wanted!r}, but the loaded model's is {given!r}")
        device = device or self.device or "cpu"
        max_running, max_step_tokens = throughput_limits(_card_bytes(device))
        return EngineConfig(
            model_dir=model_dir,
            device=device,
            dtype=dtype or self.dtype,
            base_precision=self.base_precision,
            kv_precision=self.kv_precision,
            adapter_precision=self.adapter_precision,
            arena_bytes=self._arena_bytes(),
            max_adapter_bytes=_bytes_or_none(self.adapter_vram_pool),
            min_kv_bytes=_bytes_or_none(self.kv_pool) or 0,
            host_cache_bytes=parse_bytes(self.host_cache),
            max_running=self.max_running or max_running,
            max_step_tokens=self.max_step_tokens or max_step_tokens,
            max_adapters=self.max_concurrent_adapters,
            # Nobody waits for one answer while others run: a request that was overtaken is next
            # when a place is free, and delays nobody.
            max_wait_s=math.inf,
            max_context=self.max_context,
            num_threads=self.num_threads,
            speculation=self.speculation,
        )

    def _arena_bytes(self) -> int | None:
        pools = [p for p in (self.adapter_vram_pool, self.kv_pool) if p is not None]
        return sum(map(parse_bytes, pools)) * 2 // len(pools) if pools else None


def throughput_limits(card_bytes: int | None) -> tuple[int, int]:
    """(max_running, max_step_tokens) for many prompts at once; powers of two on a GPU.

    card_bytes  the GPU's memory; None: a CPU
    """
    if card_bytes is None:
        return _CPU_RUNNING, _CPU_STEP_TOKENS
    running, tokens = (
        min(most, 1 << max(4, (card_bytes // bytes_each).bit_length() - 1))
        for most, bytes_each in (_GPU_RUNNING, _GPU_STEP_TOKENS)
    )
    return running, tokens


def _card_bytes(device: str) -> int | None:
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)
