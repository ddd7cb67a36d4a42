"""How a checkpoint stores quantised linears: what `quantization_config` of its config.json says.

Known are FP8 (E4M3) weights with a scale per tensor, per output channel or per block of 128 x 128,
and activations that are quantised by row, or by a scale in the checkpoint: `quant_method` fp8, and
compressed-tensors' float-quantized. Anything else is refused by the name of the field, before any
tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel
from kernels.fp8_groups import GROUP

_FIELD = "quantization_config"

# Fields that say nothing about the arithmetic.
_NEUTRAL = {
    "fp8": {"fmt", "dequantize", "scale_fmt"},
    "compressed-tensors": {
        "format", "global_compression_ratio", "quantization_status", "version", "observer",
    },
}  # fmt: skip
_READ = {
    "fp8": {"activation_scheme", "ignored_layers", "modules_to_not_convert", "weight_block_size"},
    "compressed-tensors": {"config_groups", "ignore"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """Linears stored as E4M3 numbers [out, in] under `weight`, with a scale under `weight_scale`.

    ignored         patterns of the modules that are stored as they are; "re:" begins a regular
                    expression, anything else is a module's name, its end, or a parent's name
    is_static       whether `input_scale` has the scale of every activation
    in_blocks       whether scales are those of blocks, under `weight_scale_inv`
    """

    ignored: tuple[str, ...]
    is_static: bool
    in_blocks: bool = False

    def ignores(self, module: str) -> bool:
        """Whether the module is stored as it is."""
        return any(_matches(pattern, module) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def read_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """Read a config.json; None: its weights are not quantised. Raises UnsupportedModel."""
    fields = config.get(_FIELD)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise _refusal("", "is not an object")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _READ:
        known = ", ".join(_READ)
        raise _refusal("quant_method", f"is {method!r}; the engine reads {known}")
    for name, value in fields.items():
        if value and name not in _READ[method] | _NEUTRAL[method] | {"quant_method"}:
            raise _refusal(name, "is not supported")
    return _read_fp8(fields) if method == "fp8" else _read_compressed(fields)


def _read_fp8(fields: Mapping[str, Any]) -> Fp8Scheme:
    if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal("fmt", f"is {fields['fmt']!r}, not e4m3")
    block = fields.get("weight_block_size")
    if block and block != [GROUP, GROUP]:
        raise _refusal("weight_block_size", f"is {block!r}; the engine reads {[GROUP, GROUP]}")
    activations = fields.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise _refusal("activation_scheme", f"is {activations!r}, not dynamic or static")
    if block and activations == "static":
        raise _refusal("activation_scheme", "is static: with blocks it must be dynamic")
    ignored = [*_names(fields, "ignored_layers"), *_names(fields, "modules_to_not_convert")]
    return Fp8Scheme(
        ignored=tuple(ignored), is_static=activations == "static", in_blocks=bool(block)
    )


def _read_compressed(fields: Mapping[str, Any]) -> Fp8Scheme:
    if fields.get("format") != "float-quantized":
        raise _refusal("format", f"is {fields.get('format')!r}; the engine reads float-quantized")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal("config_groups", "must have one group")
    [(name, group)] = groups.items()
    where = f"config_groups.{name}"
    if not isinstance(group, dict):
        raise _refusal(where, "is not an object")
    if group.get("targets") != ["Linear"]:
        raise _refusal(f"{where}.targets", f"is {group.get('targets')!r}, not ['Linear']")
    for field in ("output_activations", "format"):
        if group.get(field) not in (None, "float-quantized"):
            raise _refusal(f"{where}.{field}", "is not supported")
    _check_numbers(group.get("weights"), f"{where}.weights", ("tensor", "channel"))
    activations = group.get("input_activations")
    _check_numbers(activations, f"{where}.input_activations", ("tensor", "token"))
    assert isinstance(activations, dict)
    is_dynamic = activations.get("dynamic")
    if is_dynamic not in (True, False, None):
        raise _refusal(f"{where}.input_activations.dynamic", f"is {is_dynamic!r}, not a boolean")
    if not is_dynamic and activations["strategy"] != "tensor":
        raise _refusal(f"{where}.input_activations.strategy", "is token, without dynamic")
    return Fp8Scheme(ignored=tuple(_names(fields, "ignore")), is_static=not is_dynamic)


def _check_numbers(numbers: Any, where: str, strategies: tuple[str, ...]) -> None:
    """Raise unless `numbers` describes E4M3 with one of the strategies."""
    if not isinstance(numbers, dict):
        raise _refusal(where, "is missing")
    expected = {"num_bits": (8,), "type": ("float",), "strategy": strategies}
    for field, values in expected.items():
        if numbers.get(field) not in values:
            known = " or ".join(map(str, values))
            raise _refusal(f"{where}.{field}", f"is {numbers.get(field)!r}, not {known}")
    for field in ("actorder", "block_structure", "group_size", "zp_dtype"):
        if numbers.get(field):
            raise _refusal(f"{where}.{field}", "is not supported")
    if numbers.get("symmetric") is False:
        raise _refusal(f"{where}.symmetric", "is false: FP8 has no zero points")


def _names(fields: Mapping[str, Any], field: str) -> list[str]:
    names = fields.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(field, "is not a list of names")
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise _refusal(field, f"has a wrong regular expression, {name!r}: {error}") from error
    return names


def _refusal(field: str, problem: str) -> UnsupportedModel:
    path = f"{_FIELD}.{field}" if field else _FIELD
    return UnsupportedModel(f"config.json: {path} {problem}", param=path)
