"""Fields: a config.json that is read field by field, and refused for a field that nobody reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import UnsupportedModel
from engine.model.rope import Rotation, read_rotation

# Fields that say nothing about the arithmetic of inference.
NEUTRAL = frozenset({
    "_attn_implementation_autoset", "_from_model_config", "_name_or_path",
    "_model_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "cache_implementation", "dtype",
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

    def number(self, name: str, default: float) -> float:
        """Return a finite number above zero."""
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise UnsupportedModel(
                f"config.json: {name} is {value!r}, not a number above zero", param=name
            )
        return float(value)

    def expect(self, name: str, value: Any) -> None:
        """Refuse a field that is there and has another value."""
        if self.take(name, value) != value:
            raise UnsupportedModel(
                f"config.json: {name} is {self._given[name]!r}, not {value!r}", param=name
            )

    def head_dim(self) -> int:
        """Return the width of a head where the family has no default of its own."""
        width = self.size("hidden_size") // self.size("num_attention_heads")
        return self.size("head_dim", width)

    @property
    def layers(self) -> range:
        return range(self.size("num_hidden_layers"))

    def window(self, default: int | None = None) -> int | None:
        """Read the sliding window; null means none.

        default  where config.json has none
        """
        window = self.take("sliding_window", None if self.has("sliding_window") else default)
        return None if window is None else self.size("sliding_window", default)

    def one_window(self, default: int | None = None) -> tuple[int | None, ...]:
        """Return `window` for each layer; empty: there is none."""
        window = self.window(default)
        return () if window is None else (window,) * len(self.layers)

    def rope(self) -> Any:
        """Return `rope_parameters` (transformers 5), or `rope_scaling` (older)."""
        new, old = self.take("rope_parameters", {}), self.take("rope_scaling", {})
        if new and old and new != old:
            raise UnsupportedModel(
                "config.json: rope_scaling and rope_parameters differ", param="rope_scaling"
            )
        return new or old

    def rotation(self, theta: float | None = None, **options: Any) -> Rotation:
        """Read how all layers turn; see `read_rotation`.

        theta  where config.json has none
        """
        longest = self.size("max_position_embeddings")
        theta = self.take("rope_theta", theta)
        return read_rotation(self.rope(), longest, theta=theta, **options)[0]

    def rotations(self, theta: float | None = None, **options: Any) -> tuple[Rotation, ...]:
        """Return `rotation` for each layer."""
        return (self.rotation(theta, **options),) * len(self.layers)

    def rotations_by_type(
        self, types: Sequence[str], theta: float, local_theta: float, local_field: str = ""
    ) -> tuple[Rotation, ...]:
        """Read how layers of each type turn.

        theta, local_theta  of layers with full attention and with a window, if config.json has none
        local_field         the field of the latter; without one, there is none

        What is written in the old way scales layers with full attention alone.
        """
        longest, new = self.size("max_position_embeddings"), self.take("rope_parameters")
        thetas = {FULL: self.take("rope_theta", theta), SLIDING: local_theta}
        if local_field:
            thetas[SLIDING] = self.take(local_field, local_theta)
        given: dict[str, Any] = {FULL: self.take("rope_scaling", {}), SLIDING: {}}
        if new is not None:
            is_by_type = isinstance(new, dict) and set(new) <= {FULL, SLIDING}
            if not is_by_type or given[FULL]:
                raise UnsupportedModel(
                    "config.json: rope_parameters has to be an object with full_attention and "
                    "sliding_attention, and rope_scaling has to be absent",
                    param="rope_parameters",
                )
            given.update({name: each for name, each in new.items() if each is not None})
        read = {name: read_rotation(given[name], longest, theta=thetas[name])[0] for name in given}
        return tuple(read[name] for name in types)

    def activation(self, expected: str = "silu", *names: str) -> None:
        """Refuse another activation than the family's.

        names  the fields that name it; `hidden_act` if none is given
        """
        for name in names or ("hidden_act",):
            value = self.take(name, expected)
            if value != expected:
                raise UnsupportedModel(
                    f"config.json: {name} is {value!r}, not {expected}", param=name
                )

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
            if value and name not in self._read and name not in NEUTRAL:
                raise UnsupportedModel(f"config.json: {name} is not supported", param=name)


def windows_of(types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return each layer's sliding window, None for full attention."""
    if window is None and SLIDING in types:
        raise UnsupportedModel(
            "config.json: layer_types has sliding_attention, but sliding_window is not set",
            param="layer_types",
        )
    return tuple(window if name == SLIDING else None for name in types)
