"""What the engine is told, and what it reads of the base model's config.json.

`ModelConfig` fails closed: a field that would change the arithmetic and that the decoder does not
implement is refused by its name, as is any field nobody has heard of.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModel
from engine.eviction import ReloadCosts
from kernels import PageLayout

# Fields that say nothing about the arithmetic of inference.
_NEUTRAL = frozenset({
    "_attn_implementation_autoset", "_from_model_config", "_name_or_path",
    "_model_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype",
    "eos_token_id", "hidden_dropout", "initializer_range", "is_llama_config", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "return_dict",
    "rope_interleaved", "torch_dtype", "transformers.js_config", "transformers_version",
    "unk_token_id", "use_cache",
})  # fmt: skip
_READ = frozenset({
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "tie_word_embeddings", "vocab_size",
})  # fmt: skip
_ROPE_NEUTRAL = frozenset({"rope_type", "type", "rope_theta"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a Llama-family decoder. Letters are those of `kernels`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def projection_widths(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of q, k, v, o, gate, up, down, in the order of `kernels.Projection`."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return (
            (hidden, self.q_size),
            (hidden, kv),
            (hidden, kv),
            (self.q_size, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json; raise UnsupportedModel by field."""
        try:
            fields = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UnsupportedModel(f"{folder / 'config.json'}: {error}") from error
        generation_file = folder / "generation_config.json"
        generation = json.loads(generation_file.read_text()) if generation_file.exists() else {}
        eos = generation.get("eos_token_id", fields.get("eos_token_id"))
        return cls.from_fields(fields, eos)

    @classmethod
    def from_fields(
        cls, fields: dict[str, Any], eos_token_id: int | list[int] | None
    ) -> ModelConfig:
        """The config of a parsed config.json; raise UnsupportedModel by field."""
        _refuse_unsupported(fields)
        num_heads = int(fields["num_attention_heads"])
        hidden_size = int(fields["hidden_size"])
        eos = [] if eos_token_id is None else eos_token_id
        return cls(
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
            head_dim=int(fields.get("head_dim") or hidden_size // num_heads),
            max_positions=int(fields["max_position_embeddings"]),
            rms_norm_eps=float(fields["rms_norm_eps"]),
            rope_theta=_rope_theta(fields),
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        )


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    if fields.get("model_type") != "llama":
        raise UnsupportedModel(
            f"model_type is {fields.get('model_type')!r}; the decoder implements llama",
            param="model_type",
        )
    for name, value in fields.items():
        if name not in _NEUTRAL | _READ and value:
            raise UnsupportedModel(f"config.json: {name} is not known", param=name)
    for name in ("attention_bias", "mlp_bias", "rope_interleaved"):
        if fields.get(name):
            raise UnsupportedModel(f"config.json: {name} is not supported", param=name)
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"config.json: hidden_act is {fields['hidden_act']!r}, not silu", param="hidden_act"
        )
    required = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    for name in required:
        if fields.get(name) is None:
            raise UnsupportedModel(f"config.json: {name} is missing", param=name)


def _rope_theta(fields: dict[str, Any]) -> float:
    """theta from `rope_parameters` (transformers 5) or from `rope_theta` (before it)."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type != "default":
        raise UnsupportedModel(
            f"config.json: rope_type {rope_type!r} is not supported", param="rope_type"
        )
    for name in parameters.keys() - _ROPE_NEUTRAL:
        if parameters[name]:
            raise UnsupportedModel(f"config.json: rope parameter {name} is not known", param=name)
    return float(parameters.get("rope_theta") or fields.get("rope_theta") or 10_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs.

    model_dir             a Hugging Face folder: config.json, safetensors, tokenizer files
    device                "cpu" or "cuda[:n]"
    dtype                 "float32" or "bfloat16"; None: float32 on a CPU, bfloat16 on a GPU
    arena_bytes           memory of the page arena (docs/memory.md), KV and adapters together;
                          None: on a CPU 1 GiB, on a GPU what weights, graphs and the widest step
                          leave free, measured when the engine starts
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
    num_threads           torch's CPU threads; None: leave them
    loader_threads        adapters read from disk at a time
    max_prefetch          missing adapters of waiting requests that are brought in ahead of them
    load_timeout_s        reading an adapter for longer counts as failed
    use_triton            None: on a GPU; True on a CPU needs Triton's interpreter, for tests
    capture_graphs        record the GPU's decode graphs at the start, not when first needed
    max_skips             steps a waiting request may be overtaken because there is no room for
                          its adapter; then nobody is admitted before it
    """

    model_dir: Path
    device: str = "cpu"
    dtype: str | None = None
    arena_bytes: int | None = None
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
    num_threads: int | None = None
    loader_threads: int = 2
    max_prefetch: int = 16
    load_timeout_s: float = 60.0
    use_triton: bool | None = None
    capture_graphs: bool = True
    max_skips: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, not float32 or bfloat16")
        for name in (
            "max_running", "max_step_tokens", "page_size", "loader_threads", "max_prefetch",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("host_cache_bytes", "min_kv_bytes", "min_adapter_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")

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

    def page_layout(self, model: ModelConfig) -> PageLayout:
        """The layout of one page: the KV of `page_size` tokens over all layers."""
        layout = PageLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            page_size=self.page_size,
        )
        widest = max(max(widths) for widths in model.projection_widths)
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

    def page_limits(self, model: ModelConfig, num_pages: int) -> tuple[int, int]:
        """The most pages of an arena of `num_pages` that (KV, adapters) may have.

        Raises ValueError when the floors leave one of them nothing.
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
        """What a page of each kind costs to have again, for the order of eviction."""
        per_layer = sum(n_in * n_out for n_in, n_out in model.projection_widths)
        return ReloadCosts.estimate(
            page_bytes=self.page_bytes(model),
            num_params=model.num_layers * per_layer,
            page_size=self.page_size,
            is_cpu=self.is_cpu,
        )

    def context_limit(self, model: ModelConfig) -> int:
        return min(self.max_context or model.max_positions, model.max_positions)
