"""ModelConfig: what the engine reads of the base model's config.json.

Four families share one decoder: Llama, Mistral, Qwen2 and Qwen3. `ModelConfig` fails closed: it
refuses, by name, a field that would change the arithmetic and that the decoder does not implement,
and any field that the family does not have. A missing field has the default of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModel
from engine.model.quantization import Fp8Scheme, Int4Scheme, read_scheme
from engine.model.rope import RopeScaling, read_rope

# Fields that say nothing about the arithmetic of inference.
_NEUTRAL = frozenset({
    "_attn_implementation_autoset", "_from_model_config", "_name_or_path",
    "_model_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype",
    "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_llama_config",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "quantization_config", "return_dict", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip
_READ = frozenset({
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
})  # fmt: skip
_LAYER_WINDOWS = frozenset({
    "layer_types", "max_window_layers", "sliding_window", "use_sliding_window",
})  # fmt: skip
# model_type -> the fields that only its config has
_FAMILIES = {
    "llama": frozenset({"attention_bias", "mlp_bias"}),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": _LAYER_WINDOWS,
    "qwen3": _LAYER_WINDOWS | {"attention_bias"},
}
_MISTRAL_WINDOW = 4096
_QWEN_WINDOW = 4096
_QWEN_FULL_LAYERS = 28
_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder.

    rope_scaling  None: the frequencies are not scaled
    windows       each layer's sliding window in tokens, None for full attention; empty: all layers
                  have full attention
    qkv_bias, o_bias, mlp_bias  whether these linears add a bias
    qk_norm       whether each head's q and k pass an RMSNorm before they are rotated
    scheme        how the checkpoint stores its quantised linears; None: none is quantised
    """

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
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    scheme: Fp8Scheme | Int4Scheme | None = None

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

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of this layer attends to, itself included; None: all."""
        return self.windows[layer] if self.windows else None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json; raise UnsupportedModel naming the field."""
        fields = _read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        eos = generation.get("eos_token_id")
        return cls.from_fields(fields, fields.get("eos_token_id") if eos is None else eos)

    @classmethod
    def from_fields(
        cls, fields: dict[str, Any], eos_token_id: int | list[int] | None
    ) -> ModelConfig:
        """Check a parsed config.json; raise UnsupportedModel naming the field."""
        family = _refuse_unsupported(fields)
        num_heads, num_layers = (
            _size(fields, "num_attention_heads"),
            _size(fields, "num_hidden_layers"),
        )
        num_kv_heads = _size(fields, "num_key_value_heads", num_heads)
        max_positions = _size(fields, "max_position_embeddings")
        theta, scaling = read_rope(fields, max_positions)
        if scaling is not None:
            max_positions = max(max_positions, scaling.max_positions)
        eos = [] if eos_token_id is None else eos_token_id
        attention_bias = bool(fields.get("attention_bias"))
        config = cls(
            vocab_size=_size(fields, "vocab_size"),
            hidden_size=_size(fields, "hidden_size"),
            intermediate_size=_size(fields, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(fields, family),
            max_positions=max_positions,
            rms_norm_eps=_epsilon(fields),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            windows=_windows(fields, family, num_layers, max_positions),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(fields.get("mlp_bias")),
            qk_norm=family == "qwen3",
            scheme=read_scheme(fields, _modules(num_layers)),
        )
        if num_heads % num_kv_heads or config.head_dim % 2:
            raise UnsupportedModel(
                f"config.json: {num_heads} attention heads must be a multiple of {num_kv_heads} "
                f"key and value heads, and head_dim {config.head_dim} must be even",
                param="num_key_value_heads",
            )
        return config


def _modules(num_layers: int) -> list[str]:
    """Return the names of a decoder's modules, as checkpoints spell them."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    parts = [*attention, *mlp, "input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    return ["lm_head", "model.embed_tokens", "model.norm", *layers]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{file} is not a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> str:
    """Return the family; raise UnsupportedModel for a field that is not known."""
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UnsupportedModel(
            f"model_type is {family!r}; the decoder implements {', '.join(_FAMILIES)}",
            param="model_type",
        )
    for name, value in fields.items():
        if value and name not in _NEUTRAL | _READ | _FAMILIES[family]:
            raise UnsupportedModel(f"config.json: {name} is not supported", param=name)
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"config.json: hidden_act is {fields['hidden_act']!r}, not silu", param="hidden_act"
        )
    required = [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
    ]  # fmt: skip
    for name in required:
        if fields.get(name) is None:
            raise UnsupportedModel(f"config.json: {name} is missing", param=name)
    if family != "llama" and "num_key_value_heads" not in fields:
        raise UnsupportedModel(
            "config.json: num_key_value_heads is missing", param="num_key_value_heads"
        )
    return family


def _size(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that must be a whole number above zero."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(
            f"config.json: {name} is {value!r}, not a whole number above zero", param=name
        )
    return value


def _epsilon(fields: Mapping[str, Any]) -> float:
    value = fields["rms_norm_eps"]
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise UnsupportedModel(
            f"config.json: rms_norm_eps is {value!r}, not a number from 0 to below 1",
            param="rms_norm_eps",
        )
    return float(value)


def _head_dim(fields: Mapping[str, Any], family: str) -> int:
    if fields.get("head_dim") is not None:
        return _size(fields, "head_dim")
    if family == "qwen3":
        return _QWEN3_HEAD_DIM
    return _size(fields, "hidden_size") // _size(fields, "num_attention_heads")


def _windows(
    fields: Mapping[str, Any], family: str, num_layers: int, max_positions: int
) -> tuple[int | None, ...]:
    """Return each layer's sliding window; empty if none is set or it covers the whole context."""
    window: int | None = None
    if family == "mistral" and fields.get("sliding_window", 0) is not None:
        window = _size(fields, "sliding_window", _MISTRAL_WINDOW)
    elif fields.get("use_sliding_window") and fields.get("sliding_window", 0) is not None:
        window = _size(fields, "sliding_window", _QWEN_WINDOW)
    types = fields.get("layer_types")
    if types is None:
        num_full = 0 if family == "mistral" else fields.get("max_window_layers", _QWEN_FULL_LAYERS)
        if not isinstance(num_full, int) or num_full < 0:
            raise UnsupportedModel(
                f"config.json: max_window_layers is {num_full!r}, not a whole number",
                param="max_window_layers",
            )
        windows = tuple(None if i < num_full else window for i in range(num_layers))
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise UnsupportedModel(
                f"config.json: layer_types is not a list with one entry for each of {num_layers} "
                "layers",
                param="layer_types",
            )
        windows = tuple(_window_of(name, window) for name in types)
    if window is None or window >= max_positions:
        return ()
    return windows


def _window_of(layer_type: str, window: int | None) -> int | None:
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise UnsupportedModel(
            f"config.json: {layer_type!r} of layer_types is not supported", param="layer_types"
        )
    if window is None:
        raise UnsupportedModel(
            "config.json: layer_types has sliding_attention, but sliding_window is not set",
            param="layer_types",
        )
    return window
