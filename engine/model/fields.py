"""Fields: a config.json that is read field by field, and refused for a field that nobody reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import UnsupportedModel
from engine.model.rope import Rotation, read_rotation

# Fields that say nothing about the arithmetic of inference.
_NEUTRAL = frozenset({
    "_attn_implementation_autoset", "_from_model_config", "_name_or_path",
    "_model_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype",
    "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "is_llama_config",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "pretraining_tp", "quantization_config", "return_dict", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
})  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


class Fields:
    """Reads fields; every method raises UnsupportedModel naming the field that is wrong."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._read: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field's value; null counts as missing."""
        self._read.add(name)
        value = self._given.get(name)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Return whether the field is there, be it null."""
        self._read.add(name)
        return name in self._given

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.take(name, default))

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number above zero."""
        value = self.take(name, default)
        if value is None:
            raise UnsupportedModel(f"config.json: {name} is missing", param=name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModel(
                f"config.json: {name} is {value!r}, not a whole number above zero", param=name
            )
        return value

    def epsilon(self, name: str = "rms_norm_eps") -> float:
        """Return a norm's number from 0 to below 1."""
        value = self.take(name)
        if value is None:
            raise UnsupportedModel(f"config.json: {name} is missing", param=name)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise UnsupportedModel(
                f"config.json: {name} is {value!r}, not a number from 0 to below 1", param=name
            )
        return float(value)

    def rotation(self) -> Rotation:
        """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (older)."""
        new, old = self.take("rope_parameters", {}), self.take("rope_scaling", {})
        if new and old and new != old:
            raise UnsupportedModel(
                "config.json: rope_scaling and rope_parameters differ", param="rope_scaling"
            )
        theta = self.take("rope_theta")
        return read_rotation(new or old, theta, self.size("max_position_embeddings"))

    def layer_types(self, default: Sequence[str]) -> Sequence[str]:
        """Return FULL or SLIDING of each layer."""
        types = self.take("layer_types")
        if types is None:
            return default
        num_layers = self.size("num_hidden_layers")
        if not isinstance(types, list) or len(types) != num_layers:
            raise UnsupportedModel(
                f"config.json: layer_types is not a list with one entry for each of {num_layers} "
                "layers",
                param="layer_types",
            )
        for name in types:
            if name not in (FULL, SLIDING):
                raise UnsupportedModel(
                    f"config.json: {name!r} of layer_types is not supported", param="layer_types"
                )
        return types

    def refuse_unread(self) -> None:
        """Refuse a field that is set and that nobody has read."""
        for name, value in self._given.items():
            if value and name not in self._read and name not in _NEUTRAL:
                raise UnsupportedModel(f"config.json: {name} is not supported", param=name)


def windows_of(types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention."""
    if window is None and SLIDING in types:
        raise UnsupportedModel(
            "config.json: layer_types has sliding_attention, but sliding_window is not set",
            param="layer_types",
        )
    return tuple(window if name == SLIDING else None for name in types)
