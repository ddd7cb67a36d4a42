"""The shapes of layers in a family whose layers differ: Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

FULL, SLIDING = "full_attention", "sliding_attention"
#: The fields of config.json that say what the shapes are.
SHAPE_FIELDS = (
    *("num_hidden_layers", "layer_types", "head_dim", "num_key_value_heads", "intermediate_size"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"),
    *("num_kv_shared_layers", "use_double_wide_mlp"),
)
_PATTERN, _HEAD_DIM, _GLOBAL_HEAD_DIM = 6, 256, 512


class LayerShape(NamedTuple):
    """The shape of a layer.

    head_dim, kv_heads  width of a head, and the number of those of keys and values
    inner     width of the MLP
    is_full   whether it has full attention
    has_v     whether values have a linear of their own; else they are the keys before their norm
    keys_of   the earlier layer whose keys and values it reads; None: it has its own
    """

    head_dim: int
    kv_heads: int
    inner: int
    is_full: bool
    has_v: bool = True
    keys_of: int | None = None

    def widths(self, hidden: int, num_heads: int) -> tuple[tuple[int, int], ...]:
        """Return (in, out) of q, k, v, o, gate, up and down; (0, 0) of one that there is not."""
        queries, keys = num_heads * self.head_dim, self.kv_heads * self.head_dim
        k = (0, 0) if self.keys_of is not None else (hidden, keys)
        v = k if self.has_v else (0, 0)
        mlp = (hidden, self.inner), (hidden, self.inner), (self.inner, hidden)
        return (hidden, queries), k, v, (queries, hidden), *mlp


def gemma4_shapes(config: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """Return each layer's shape. Raises ValueError naming the field that is wrong."""
    layers, types = range(_size(config, "num_hidden_layers")), config.get("layer_types")
    if types is None:
        types = [FULL if (i + 1) % _PATTERN == 0 else SLIDING for i in layers]
    if not isinstance(types, list) or len(types) != len(layers) or not {*types} <= {FULL, SLIDING}:
        raise ValueError(f"layer_types is not a list with {SLIDING} or {FULL} for each layer")
    types = [*types[:-1], FULL]  # as transformers has it
    num_shared = config.get("num_kv_shared_layers") or 0
    if type(num_shared) is not int or not 0 <= num_shared < len(layers):
        raise ValueError(f"num_kv_shared_layers is {num_shared!r}, not less than the layers")
    own = types[: len(layers) - num_shared]
    if not {*types} <= {*own}:
        raise ValueError("num_kv_shared_layers leaves a type of layers without keys and values")
    of_full, inner = _of_full(config), _size(config, "intermediate_size")
    found = []
    for layer, kind in enumerate(types):
        is_full, is_shared = kind == FULL, layer >= len(own)
        given = of_full if is_full else {}
        if config.get("per_layer_config"):
            given = _given(config, layer)
        shape = LayerShape(
            head_dim=given.get("head_dim") or _size(config, "head_dim", _HEAD_DIM),
            kv_heads=given.get("num_key_value_heads") or _size(config, "num_key_value_heads"),
            inner=inner * (1 + (is_shared and bool(config.get("use_double_wide_mlp")))),
            is_full=is_full,
            has_v=not (is_full and config.get("attention_k_eq_v")),
            keys_of=max(i for i, each in enumerate(own) if each == kind) if is_shared else None,
        )
        found.append(shape)
    return tuple(found)


def _of_full(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that layers with full attention alone have."""
    sizes = {"head_dim": _size(config, "global_head_dim", _GLOBAL_HEAD_DIM)}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        sizes["num_key_value_heads"] = _size(config, "num_global_key_value_heads")
    return sizes


def _given(config: Mapping[str, Any], layer: int) -> dict[str, int]:
    """Return a layer's own sizes, as transformers saves them."""
    by_layer = config["per_layer_config"]
    sizes = {str(key): each for key, each in by_layer.items()} if isinstance(by_layer, dict) else {}
    own = sizes.get(str(layer), {})
    known = isinstance(own, dict) and {*own} <= {"head_dim", "num_key_value_heads"}
    if not isinstance(by_layer, dict) or not known:
        raise ValueError("per_layer_config has more than a head_dim and num_key_value_heads")
    return {name: _size(own, name) for name in own}


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}, not a size")
    return value
