"""Read from config.json's `quantization_config` how a checkpoint stores quantised linears.

Known are FP8 (E4M3) weights with a scale per tensor, per output channel or per block of 128 x 128,
whose activations are quantised by row, or by a scale in the checkpoint; and weights in 4 bits by
groups of columns, whose activations are not. Anything else is refused by the name of the field,
before any tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.errors import UnsupportedModel
from kernels.fp8_groups import GROUP

_FIELD = "quantization_config"

# Fields that say nothing about the arithmetic.
_NEUTRAL = {
    "fp8": {"fmt", "dequantize", "scale_fmt"},
    "compressed-tensors": {
        "format", "global_compression_ratio", "quantization_status", "version", "observer",
    },
    "gptq": {
        "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_percent",
        "dataset", "exllama_config", "max_input_length", "meta", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "pack_dtype",
        "pad_token_id", "static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16",
        "use_exllama",
    },
    "awq": {
        "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse", "zero_point",
    },
}  # fmt: skip
_READ = {
    "fp8": {"activation_scheme", "ignored_layers", "modules_to_not_convert", "weight_block_size"},
    "compressed-tensors": {"config_groups", "ignore", "kv_cache_scheme"},
    "gptq": {"bits", "checkpoint_format", "desc_act", "group_size"},
    "awq": {"bits", "group_size", "modules_to_not_convert", "version"},
}
_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert")
_GROUPS = (32, 64, 128)
_FP8_ARGS = {
    "num_bits", "observer", "observer_kwargs", "scale_dtype", "strategy", "symmetric", "type",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The properties of all schemes.

    ignored  patterns of the modules that are stored as they are; "re:" begins a regular expression,
             anything else is a module's name, its end, or a parent's name
    has_kv_scales  whether each layer has a scale for keys and one for values, `k_scale`, `v_scale`
    """

    ignored: tuple[str, ...] = ()
    has_kv_scales: bool = False

    def ignores(self, module: str) -> bool:
        """Return whether the module is stored as it is."""
        return any(_matches(pattern, module) for pattern in self.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme(Scheme):
    """Linears stored as E4M3 numbers [out, in] under `weight`.

    is_static  whether the checkpoint has one scale for every activation
    in_blocks  whether a weight's scales are those of blocks
    weight, activation  the possible names of the scales' tensors
    """

    is_static: bool
    in_blocks: bool = False
    weight: tuple[str, ...] = ("weight_scale",)
    activation: tuple[str, ...] = ("input_scale",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Scheme(Scheme):
    """Linears stored in 4 bits, in one of three layouts (`engine.model.int4_tensors`).

    group      columns that share a scale; None: all of a row
    has_zeros  whether zeros are stored; else they are 8
    less_one   whether stored zeros are one too small
    """

    layout: Literal["gptq", "awq", "packed"]
    group: int | None
    has_zeros: bool = True
    less_one: bool = False


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def read_scheme(
    config: Mapping[str, Any], modules: Collection[str]
) -> Fp8Scheme | Int4Scheme | None:
    """Read a config.json; None: its weights are not quantised. Raises UnsupportedModel.

    modules  the names of the model's modules
    """
    fields = config.get(_FIELD)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise _refusal("", "is not an object")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in _READ:
        known = ", ".join(_READ)
        problem = f"is {method!r}; the engine reads {known}: serve the folder in 16 bits instead"
        raise _refusal("quant_method", problem)
    for name, value in fields.items():
        if value and name not in _READ[method] | _NEUTRAL[method] | {"quant_method"}:
            raise _refusal(name, "is not supported")
    scheme = _READERS[method](fields)
    if scheme.ignored and not any(map(scheme.ignores, modules)):
        field = next(name for name in _IGNORED if fields.get(name))
        raise _refusal(field, f"names no module of the model: {', '.join(scheme.ignored[:3])}")
    if kv := fields.get("kv_cache_scheme"):
        _check_numbers(kv, "kv_cache_scheme", ("tensor",))
        scheme = replace(scheme, has_kv_scales=True)
    return scheme


def _read_fp8(fields: Mapping[str, Any]) -> Fp8Scheme:
    if fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refusal("fmt", f"is {fields['fmt']!r}, not e4m3")
    block = fields.get("weight_block_size")
    if block is not None and block != [GROUP, GROUP]:
        raise _refusal("weight_block_size", f"is {block!r}; the engine reads {[GROUP, GROUP]}")
    activations = fields.get("activation_scheme", "dynamic")
    if activations not in ("dynamic", "static"):
        raise _refusal("activation_scheme", f"is {activations!r}, not dynamic or static")
    if block and activations == "static":
        raise _refusal("activation_scheme", "is static: with blocks it must be dynamic")
    ignored = [*_names(fields, "ignored_layers"), *_names(fields, "modules_to_not_convert")]
    return Fp8Scheme(
        ignored=tuple(ignored),
        is_static=activations == "static",
        in_blocks=bool(block),
        weight=("weight_scale_inv", "weight_scale"),
        activation=("activation_scale", "input_scale"),
    )


def _read_gptq(fields: Mapping[str, Any]) -> Int4Scheme:
    _check_bits(fields)
    if fields.get("desc_act"):
        raise _refusal("desc_act", "is true: columns have to be in order, with desc_act false")
    version = fields.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _refusal("checkpoint_format", f"is {version!r}, not gptq or gptq_v2")
    return Int4Scheme(layout="gptq", group=_group(fields), less_one=version == "gptq")


def _read_awq(fields: Mapping[str, Any]) -> Int4Scheme:
    _check_bits(fields)
    version = fields.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refusal("version", f"is {version!r}, not gemm")
    ignored = _names(fields, "modules_to_not_convert")
    return Int4Scheme(layout="awq", group=_group(fields), ignored=tuple(ignored))


def _check_bits(fields: Mapping[str, Any]) -> None:
    if fields.get("bits") != 4:
        raise _refusal("bits", f"is {fields.get('bits')!r}, not 4")


def _group(fields: Mapping[str, Any], where: str = "") -> int | None:
    """Return the columns of a group; None: a row has one."""
    group = fields.get("group_size")
    if group in (-1, None):
        return None
    if type(group) is not int or group not in _GROUPS:
        known = ", ".join(map(str, _GROUPS))
        raise _refusal(f"{where}group_size", f"is {group!r}, not {known} or -1")
    return group


def _read_compressed(fields: Mapping[str, Any]) -> Fp8Scheme | Int4Scheme:
    form = fields.get("format")
    if form not in ("float-quantized", "pack-quantized"):
        raise _refusal("format", f"is {form!r}; the engine reads float-quantized, pack-quantized")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refusal("config_groups", "must have one group")
    [(name, group)] = groups.items()
    where = f"config_groups.{name}"
    if not isinstance(group, dict):
        raise _refusal(where, "is not an object")
    _refuse_others(group, where, {"format", "input_activations", "targets", "weights"})
    if group.get("targets") != ["Linear"]:
        raise _refusal(f"{where}.targets", f"is {group.get('targets')!r}, not ['Linear']")
    if group.get("format") not in (None, form):
        raise _refusal(f"{where}.format", f"is {group['format']!r}, not {form}")
    if form == "pack-quantized":
        return _read_packed(fields, group, where)
    _check_numbers(group.get("weights"), f"{where}.weights", ("tensor", "channel"))
    activations = group.get("input_activations")
    inputs = f"{where}.input_activations"
    _check_numbers(activations, inputs, ("tensor", "token"), {"dynamic"})
    assert isinstance(activations, dict)
    is_dynamic = activations.get("dynamic")
    if is_dynamic not in (True, False, None):
        raise _refusal(f"{inputs}.dynamic", f"is {is_dynamic!r}, not a boolean")
    if not is_dynamic and activations["strategy"] != "tensor":
        raise _refusal(f"{inputs}.strategy", "is token, without dynamic")
    return Fp8Scheme(ignored=tuple(_names(fields, "ignore")), is_static=not is_dynamic)


def _read_packed(fields: Mapping[str, Any], group: Mapping[str, Any], where: str) -> Int4Scheme:
    if group.get("input_activations"):
        raise _refusal(f"{where}.input_activations", "is not supported with weights in 4 bits")
    weights = group.get("weights")
    where = f"{where}.weights"
    if not isinstance(weights, dict):
        raise _refusal(where, "is missing")
    strategy = weights.get("strategy")
    expected = {"num_bits": (4,), "type": ("int",), "strategy": ("group", "channel")}
    _check_values(weights, where, expected)
    _refuse_others(weights, where, _FP8_ARGS | {"group_size", "zp_dtype"})
    size = _group(weights, f"{where}.")
    if (size is None) != (strategy == "channel"):
        raise _refusal(f"{where}.group_size", f"is {size!r} with the strategy {strategy}")
    ignored = tuple(_names(fields, "ignore"))
    symmetric = weights.get("symmetric", True)
    return Int4Scheme(layout="packed", group=size, has_zeros=not symmetric, ignored=ignored)


def _refuse_others(fields: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Raise for a field that is set and is not known."""
    for field, value in fields.items():
        if value and field not in known:
            raise _refusal(f"{where}.{field}", "is not supported")


def _check_values(
    numbers: Mapping[str, Any], where: str, expected: Mapping[str, tuple[Any, ...]]
) -> None:
    for field, values in expected.items():
        if numbers.get(field) not in values:
            known = " or ".join(map(str, values))
            raise _refusal(f"{where}.{field}", f"is {numbers.get(field)!r}, not {known}")


def _check_numbers(
    numbers: Any, where: str, strategies: tuple[str, ...], others: Collection[str] = ()
) -> None:
    """Raise unless `numbers` describes E4M3 with one of the strategies; `others` may be set."""
    if not isinstance(numbers, dict):
        raise _refusal(where, "is missing")
    expected = {"num_bits": (8,), "type": ("float",), "strategy": strategies}
    _check_values(numbers, where, expected)
    _refuse_others(numbers, where, _FP8_ARGS.union(others))
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


_READERS: dict[str, Callable[[Mapping[str, Any]], Fp8Scheme | Int4Scheme]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "gptq": _read_gptq,
    "awq": _read_awq,
}


def _refusal(field: str, problem: str) -> UnsupportedModel:
    path = f"{_FIELD}.{field}" if field else _FIELD
    return UnsupportedModel(f"config.json: {path} {problem}", param=path)
