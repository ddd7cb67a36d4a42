"""PEFT's adapter_config.json, read without trusting it.

Fails closed, by name: every field is one that is honoured, one that is known to change nothing at
inference, or it is refused. The fields are those of peft 0.21's LoraConfig.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import AdapterMismatch

MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 2048
# Beyond it fp32, in which adapters are scaled, has no numbers.
_MAX_ALPHA = 1e38

HONOURED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "bias", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "use_dora", "lora_bias", "ensure_weight_tying", "modules_to_save",
    "trainable_token_indices",
})  # fmt: skip
# What they choose is already written in the tensors, or matters to training alone.
NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "qalora_group_size",
    "runtime_config",
})  # fmt: skip
# Initialisations after which the saved A and B are all of the adapter. The others (PiSSA, OLoRA,
# CorDA, LoftQ, LoRA-GA) change the base weights too, so that A and B alone give a wrong answer.
_PLAIN_INITS = frozenset({True, False, None, "gaussian", "eva", "orthogonal", "default"})


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


def is_target(config: Mapping[str, Any], module: str, layer: int | None) -> bool:
    """Whether PEFT would adapt `module`, a dotted path, of `layer`; None: it is of no layer.

    A regular expression as target_modules is not run: then the file's tensors decide.
    Source: check_target_module_exists in peft/tuners/tuners_utils.py.
    """
    targets = config.get("target_modules")
    if _names(config.get("exclude_modules") or (), module):
        return False
    if not isinstance(targets, list) or module in targets:
        return True
    layers = config.get("layers_to_transform")
    if isinstance(layers, int):
        layers = [layers]
    return _names(targets, module) and (not layers or layer in layers)


def _names(names: Any, module: str) -> bool:
    """Whether one of `names` is the module's dotted path or a tail of it, cut at a dot."""
    parts = module.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


class ModuleValues:
    """Rank and alpha of each module, by a config that was checked.

    Each pattern is compiled once: there may be thousands, and hundreds of modules to match.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ranks = _compiled(config.get("rank_pattern")), config["r"]
        self._alphas = _compiled(config.get("alpha_pattern")), config["lora_alpha"]

    def rank(self, module: str) -> Any:
        """As the config has it for `module`, a dotted path; it need not be a rank."""
        return _first_match(*self._ranks, module)

    def alpha(self, module: str) -> Any:
        return _first_match(*self._alphas, module)


def _compiled(patterns: Mapping[str, Any] | None) -> list[tuple[re.Pattern[str], Any]]:
    """As PEFT matches them; source: get_pattern_key in peft/utils/other.py."""
    return [
        (re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in (patterns or {}).items()
    ]


def _first_match(patterns: Sequence[tuple[re.Pattern[str], Any]], default: Any, module: str) -> Any:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise AdapterMismatch naming the first field that cannot be honoured."""
    for name, value in config.items():
        if name not in HONOURED | NEUTRAL and value:
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
    _check_switches(config)
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
    _check_modules(config)
    for field in ("rank_pattern", "alpha_pattern"):
        _check_patterns(field, config.get(field))


def _check_switches(config: Mapping[str, Any]) -> None:
    for name in ("use_rslora", "use_dora", "lora_bias", "ensure_weight_tying"):
        if not isinstance(config.get(name), bool | None):
            raise AdapterMismatch(f"adapter_config.json: {name} is not a bool", param=name)
    if not config.get("lora_bias"):
        return
    # As LoraConfig has it.
    if config.get("use_dora"):
        raise AdapterMismatch(
            "adapter_config.json: lora_bias does not go together with use_dora", param="lora_bias"
        )
    if not isinstance(config.get("init_lora_weights", True), bool):
        raise AdapterMismatch(
            "adapter_config.json: lora_bias needs init_lora_weights to be true or false",
            param="lora_bias",
        )


def _check_modules(config: Mapping[str, Any]) -> None:
    targets, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    if not isinstance(targets, list | str | None):
        raise AdapterMismatch(
            "adapter_config.json: target_modules is no list of names", param="target_modules"
        )
    if not isinstance(excluded, list):
        raise AdapterMismatch(
            "adapter_config.json: exclude_modules is no list of names", param="exclude_modules"
        )
    layers = config.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise AdapterMismatch(
            "adapter_config.json: layers_to_transform is no list of layers",
            param="layers_to_transform",
        )
    if config.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
        raise AdapterMismatch(
            "adapter_config.json: layers_pattern is not 'layers'", param="layers_pattern"
        )


def _check_alpha(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_ALPHA:
        raise AdapterMismatch(
            f"adapter_config.json: {name} has {repr(value)[:80]}, not a number up to "
            f"{_MAX_ALPHA:g}",
            param=name,
        )


def _check_patterns(field: str, patterns: Any) -> None:
    """Patterns are regular expressions written by a stranger: only harmless ones pass."""
    if not patterns:
        return
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise AdapterMismatch(
            f"adapter_config.json: {field} is not an object of {MAX_PATTERNS} patterns at most",
            param=field,
        )
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
