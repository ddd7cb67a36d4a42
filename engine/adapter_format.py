"""Does this PEFT adapter fit this base model? Pure functions over its config and tensor header.

Fails closed, by name: every field of adapter_config.json is one that is honoured, one that is
known to change nothing at inference, or it is refused; every tensor of the file is consumed
exactly once; every shape must fit. An adapter that passes is applied exactly as PEFT applies it.
The fields are those of peft 0.21's LoraConfig.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import ModelConfig
from engine.errors import AdapterMismatch

MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20

PROJECTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

# Honoured below.
_HONOURED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "bias", "init_lora_weights", "target_modules",
})  # fmt: skip
# What they choose is already written in the tensors, or matters to training alone.
_NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern",
    "megatron_core", "loftq_config", "eva_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
})  # fmt: skip
# Initialisations after which the saved A and B are all of the adapter. The others (PiSSA, OLoRA,
# CorDA, LoftQ, LoRA-GA) change the base weights too, so that A and B alone give a wrong answer.
_PLAIN_INITS = frozenset({True, False, None, "gaussian", "eva", "orthogonal", "default"})

_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(?P<layer>\d{1,4})\."
    r"(?P<block>self_attn|mlp)\.(?P<name>[a-z]+_proj)\."
    r"lora_(?P<side>[AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One adapted linear: the tensors A [rank, in] and B [out, rank] of a (layer, projection)."""

    layer: int
    projection: int
    rank: int
    scaling: float
    a_name: str
    b_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """What an adapter changes, in layer order; all that is needed to place it in memory."""

    targets: tuple[Target, ...]
    file_bytes: int

    @property
    def max_rank(self) -> int:
        return max(target.rank for target in self.targets)


def parse_config(text: bytes) -> dict[str, Any]:
    """adapter_config.json as a dict; raise AdapterMismatch when it is not one."""
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterMismatch(f"adapter_config.json has {len(text)} bytes; 1 MiB is the limit")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterMismatch(f"adapter_config.json is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterMismatch("adapter_config.json is not a JSON object")
    return config


def parse_header(start: bytes, file_bytes: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype, shape) from the start of a safetensors file.

    start       the file's first bytes, header included
    file_bytes  the file's size; the tensors must fill it exactly, without gap or overlap
    Raises AdapterMismatch on anything else.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise AdapterMismatch("adapter_model.safetensors is truncated or not a safetensors file")
    try:
        header = json.loads(start[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise AdapterMismatch(f"the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise AdapterMismatch("the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, span = _header_entry(name, entry)
        tensors[name] = (dtype, shape)
        spans.append(span)
    end = 0
    for low, high in sorted(spans):
        if low != end:
            raise AdapterMismatch("the safetensors header has tensors that overlap or leave gaps")
        end = high
    if 8 + length + end != file_bytes:
        raise AdapterMismatch(
            f"the safetensors header describes {8 + length + end} bytes; the file has {file_bytes}"
        )
    return tensors


def _header_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict):
        raise AdapterMismatch(f"tensor {name}: its header entry is not an object", param=name)
    dtype = entry.get("dtype")
    if dtype not in _DTYPE_BYTES:
        raise AdapterMismatch(f"tensor {name}: dtype {dtype!r} is not supported", param=name)
    shape, offsets = _integers(name, entry.get("shape")), _integers(name, entry.get("data_offsets"))
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * _DTYPE_BYTES[dtype]:
        raise AdapterMismatch(f"tensor {name}: its size is not that of its shape", param=name)
    return dtype, shape, (offsets[0], offsets[1])


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 1 << 48 for i in value):
        raise AdapterMismatch(f"tensor {name}: bad shape or offsets", param=name)
    return tuple(value)


def plan_adapter(
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    model: ModelConfig,
    file_bytes: int = 0,
) -> AdapterPlan:
    """What the adapter changes in `model`; raise AdapterMismatch naming what does not fit."""
    check_config(config)
    sides: dict[tuple[int, int], dict[str, str]] = {}
    for name in tensors:
        layer, projection, side = _locate(name, model)
        pair = sides.setdefault((layer, projection), {})
        if side in pair:
            raise AdapterMismatch(f"tensor {name} repeats {pair[side]}", param=name)
        pair[side] = name
    if not sides:
        raise AdapterMismatch("adapter_model.safetensors has no tensors")
    targets = []
    for (layer, projection), pair in sorted(sides.items()):
        if len(pair) != 2:
            (name,) = pair.values()
            raise AdapterMismatch(f"tensor {name} has no counterpart", param=name)
        targets.append(_target(config, tensors, model, (layer, projection), pair))
    return AdapterPlan(targets=tuple(targets), file_bytes=file_bytes)


def _locate(name: str, model: ModelConfig) -> tuple[int, int, str]:
    match = _TENSOR_NAME.fullmatch(name)
    if match is None or match["name"] not in PROJECTION_NAMES:
        raise AdapterMismatch(f"tensor {name} is not one of a supported kind", param=name)
    projection = PROJECTION_NAMES.index(match["name"])
    if (match["block"] == "self_attn") != (projection < 4):
        raise AdapterMismatch(f"tensor {name} is not one of a supported kind", param=name)
    layer = int(match["layer"])
    if layer >= model.num_layers:
        raise AdapterMismatch(
            f"tensor {name} is of layer {layer}; the base has {model.num_layers}", param=name
        )
    return layer, projection, match["side"]


def _target(
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    model: ModelConfig,
    place: tuple[int, int],
    pair: Mapping[str, str],
) -> Target:
    layer, projection = place
    block = "self_attn" if projection < 4 else "mlp"
    module = f"model.layers.{layer}.{block}.{PROJECTION_NAMES[projection]}"
    if not _is_target(module, config.get("target_modules")):
        raise AdapterMismatch(
            f"tensor {pair['A']} is of a module that target_modules does not name",
            param="target_modules",
        )
    rank = _pattern_value(config, "rank_pattern", module, config["r"])
    alpha = _pattern_value(config, "alpha_pattern", module, config["lora_alpha"])
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise AdapterMismatch(f"{module}: rank {rank} is not from 1 to {MAX_RANK}", param="r")
    in_width, out_width = model.projection_widths[projection]
    for side, wanted in (("A", (rank, in_width)), ("B", (out_width, rank))):
        shape = tensors[pair[side]][1]
        if shape != wanted:
            raise AdapterMismatch(
                f"tensor {pair[side]} has shape {list(shape)}; the base and rank {rank} need "
                f"{list(wanted)}",
                param=pair[side],
            )
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Target(
        layer=layer,
        projection=projection,
        rank=rank,
        scaling=alpha / divisor,
        a_name=pair["A"],
        b_name=pair["B"],
    )


def _is_target(module: str, target_modules: Any) -> bool:
    """Whether PEFT would adapt `module`. A regular expression is not run: the tensors decide."""
    if not isinstance(target_modules, list):
        return True
    return any(module == name or module.endswith(f".{name}") for name in target_modules)


def _pattern_value(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value for `module` of rank_pattern or alpha_pattern, matched as PEFT matches it."""
    patterns = config.get(field) or {}
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def check_config(config: Mapping[str, Any]) -> None:
    """Raise AdapterMismatch naming the first field that cannot be honoured."""
    for name, value in config.items():
        if name not in _HONOURED | _NEUTRAL and value:
            raise AdapterMismatch(f"adapter_config.json: {name} is not supported", param=name)
    if config.get("peft_type") != "LORA":
        raise AdapterMismatch(
            f"adapter_config.json: peft_type is {config.get('peft_type')!r}, not LORA",
            param="peft_type",
        )
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise AdapterMismatch(
            f"adapter_config.json: task_type is {config['task_type']!r}, not CAUSAL_LM",
            param="task_type",
        )
    if config.get("bias", "none") != "none":
        raise AdapterMismatch("adapter_config.json: bias must be 'none'", param="bias")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in _PLAIN_INITS:
        raise AdapterMismatch(
            f"adapter_config.json: init_lora_weights {init!r} changes the base weights; convert "
            "the adapter to a plain LoRA first",
            param="init_lora_weights",
        )
    if type(config.get("r")) is not int or not 1 <= config["r"] <= MAX_RANK:
        raise AdapterMismatch(
            f"adapter_config.json: r is {config.get('r')!r}, not from 1 to {MAX_RANK}", param="r"
        )
    _check_alpha("lora_alpha", config.get("lora_alpha"))
    if not isinstance(config.get("use_rslora", False), bool):
        raise AdapterMismatch("adapter_config.json: use_rslora is not a bool", param="use_rslora")
    for field in ("rank_pattern", "alpha_pattern"):
        _check_patterns(field, config.get(field))


def _check_alpha(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterMismatch(
            f"adapter_config.json: {name} has {value!r}, not a number", param=name
        )


def _check_patterns(field: str, patterns: Any) -> None:
    """Patterns are regular expressions written by a stranger: only harmless ones pass."""
    if not patterns:
        return
    if not isinstance(patterns, dict) or len(patterns) > 10_000:
        raise AdapterMismatch(f"adapter_config.json: {field} is not a small object", param=field)
    for pattern, value in patterns.items():
        # Without quantifiers and alternatives a match takes linear time.
        if len(pattern) > 256 or not re.fullmatch(r"[\w.^$\\-]*", pattern):
            raise AdapterMismatch(
                f"adapter_config.json: {field} has the pattern {pattern[:80]!r}; only names, "
                "dots, escapes and anchors are supported",
                param=field,
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterMismatch(
                f"adapter_config.json: {field}: {pattern!r}: {error}", param=field
            ) from error
        if field == "alpha_pattern":
            _check_alpha(field, value)
