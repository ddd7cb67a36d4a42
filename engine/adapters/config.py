"""PEFT's adapter_config.json, read without trusting it.

Fails closed, by name: every field is one that is honoured, one that is known to change nothing at
inference, or it is refused. The fields are those of peft 0.21's LoraConfig.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from contract.adapter_limits import BIAS_MODES, DEFAULT_ALPHA, DEFAULT_RANK, MAX_PATTERNS, MAX_RANK
from contract.module_patterns import (
    BadPattern,
    ModuleNames,
    Pattern,
    read_key,
    read_pattern,
)
from engine.errors import AdapterMismatch

MAX_CONFIG_BYTES = 1 << 20
# Beyond it fp32, in which adapters are scaled, has no numbers.
_MAX_ALPHA = 1e38

HONOURED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "bias", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "use_dora", "lora_bias", "ensure_weight_tying", "modules_to_save",
    "trainable_token_indices",
})  # fmt: skip
# What they choose is already written in the tensors, or matters to training alone. Those of an
# initialisation stay behind in an adapter that PEFT converted to a plain one.
NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config",
})  # fmt: skip
# Initialisations after which the saved A and B are all of the adapter. The others (PiSSA, OLoRA,
# CorDA, LoftQ, LoRA-GA) change the base weights too, so that A and B alone give a wrong answer.
_PLAIN_INITS = frozenset({True, False, None, "gaussian", "eva", "orthogonal"})


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


@dataclass(frozen=True, slots=True)
class ConfigPatterns:
    """A checked config's expressions, read.

    targets, excluded  of target_modules and exclude_modules when they are one expression
    ranks, alphas      of rank_pattern and alpha_pattern, in their order
    """

    targets: Pattern | None
    excluded: Pattern | None
    ranks: list[tuple[Pattern, int]]
    alphas: list[tuple[Pattern, Any]]


class ModuleRules:
    """Which modules of a base a checked config adapts, with what rank and alpha, as PEFT has it.

    modules  dotted path -> its layer; None: it is of no layer
    Raises AdapterMismatch when the patterns take too long.
    Sources: check_target_module_exists and _maybe_include_all_linear_layers in
    peft/tuners/tuners_utils.py.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        patterns: ConfigPatterns,
        modules: Mapping[str, int | None],
    ) -> None:
        self._rank: int = config.get("r", DEFAULT_RANK)
        self._alpha = config.get("lora_alpha", DEFAULT_ALPHA)
        names = ModuleNames(modules)
        field = "rank_pattern"
        try:
            self._ranks = names.first(patterns.ranks)
            field = "alpha_pattern"
            self._alphas = names.first(patterns.alphas)
            field = "exclude_modules"
            self._excluded = _meant(names, patterns.excluded, config.get(field) or [], modules)
            field = "target_modules"
            self._targets = self._targeted(config, patterns, names, modules)
        except BadPattern as error:
            raise AdapterMismatch(f"adapter_config.json: {field} {error}", param=field) from error

    def _targeted(
        self,
        config: Mapping[str, Any],
        patterns: ConfigPatterns,
        names: ModuleNames,
        modules: Mapping[str, int | None],
    ) -> frozenset[str]:
        targets = config.get("target_modules")
        if targets is None:
            return frozenset(modules)
        if is_all_linear(targets):  # without the head, in PEFT too
            return frozenset(name for name, layer in modules.items() if layer is not None)
        found = _meant(names, patterns.targets, targets, modules)
        layers = layers_of(config)
        if not layers or isinstance(targets, str):
            return found
        # A full path counts in whatever layer it is.
        return frozenset(name for name in found if name in targets or modules[name] in layers)

    def is_target(self, module: str) -> bool:
        """Whether PEFT would adapt it; of a config without target_modules any may be."""
        return module in self._targets and module not in self._excluded

    def rank(self, module: str) -> int:
        return self._ranks.get(module, self._rank)

    def alpha(self, module: str) -> Any:
        return self._alphas.get(module, self._alpha)


def _meant(
    names: ModuleNames, pattern: Pattern | None, listed: list[str], modules: Iterable[str]
) -> frozenset[str]:
    """The modules that the expression matches, or whose path or a tail of it is listed."""
    if pattern is not None:
        return names.whole(pattern)
    wanted = frozenset(listed)
    return frozenset(name for name in modules if wanted and not wanted.isdisjoint(_tails(name)))


def _tails(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def is_all_linear(targets: Any) -> bool:
    """Whether target_modules is PEFT's word for every linear of the layers."""
    return isinstance(targets, str) and targets.lower() == "all-linear"


def layers_of(config: Mapping[str, Any]) -> list[Any]:
    """layers_to_transform as a list; empty: all."""
    layers = config.get("layers_to_transform")
    return [layers] if type(layers) is int else layers or []


def check_config(config: Mapping[str, Any]) -> ConfigPatterns:
    """Its expressions; raise AdapterMismatch naming the first field that cannot be honoured."""
    # First: the fields of other methods are not strange, they are theirs.
    if config.get("peft_type") != "LORA":
        found = f"is {config['peft_type']!r}"[:80] if "peft_type" in config else "is missing"
        raise _mismatch("peft_type", f"{found}; only LORA is supported: train a LoRA adapter")
    for name, value in config.items():
        if name not in HONOURED | NEUTRAL and value:
            raise _mismatch(name, "is not supported: train without it")
    if config.get("task_type") not in ("CAUSAL_LM", None):
        raise _mismatch("task_type", f"is {config['task_type']!r}, not CAUSAL_LM")
    _check_switches(config)
    if config.get("bias", "none") not in BIAS_MODES:
        raise _mismatch("bias", f"is {config['bias']!r}, not one of {', '.join(BIAS_MODES)}")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or init not in _PLAIN_INITS:
        raise _mismatch(
            "init_lora_weights",
            f"is {init!r}, which changes the base weights too: save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    rank = config.get("r", DEFAULT_RANK)
    if not _is_rank(rank):
        raise _mismatch("r", f"is {repr(rank)[:80]}, not from 1 to {MAX_RANK}")
    _check_alpha("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA))
    _check_layers(config)
    targets = config.get("target_modules")
    return ConfigPatterns(
        targets=None if is_all_linear(targets) else _modules_pattern("target_modules", targets),
        excluded=_modules_pattern("exclude_modules", config.get("exclude_modules") or None),
        ranks=_patterns("rank_pattern", config.get("rank_pattern")),
        alphas=_patterns("alpha_pattern", config.get("alpha_pattern")),
    )


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _mismatch(field: str, problem: str) -> AdapterMismatch:
    return AdapterMismatch(f"adapter_config.json: {field} {problem}", param=field)


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


def _check_layers(config: Mapping[str, Any]) -> None:
    layers = layers_of(config)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _mismatch("layers_to_transform", "is no list of layers")
    if config.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
        raise _mismatch("layers_pattern", "is not 'layers'")
    if not isinstance(config.get("target_modules"), str):
        return
    for field, value in (
        ("layers_to_transform", layers),
        ("layers_pattern", config.get("layers_pattern")),
    ):
        if value:  # as LoraConfig has it
            raise _mismatch(
                field, "does not go together with target_modules as an expression: say it there"
            )


def _modules_pattern(field: str, value: Any) -> Pattern | None:
    """The expression of target_modules or exclude_modules; None: they are a list, or nothing."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return None
    if not isinstance(value, str):
        raise _mismatch(field, "is neither a list of names nor an expression")
    try:
        return read_pattern(value)
    except BadPattern as error:
        raise _mismatch(field, f"has the pattern {value[:80]!r}, which {error}") from error


def _check_alpha(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_ALPHA:
        raise _mismatch(name, f"has {repr(value)[:80]}, not a number up to {_MAX_ALPHA:g}")


def _patterns(field: str, patterns: Any) -> list[tuple[Pattern, Any]]:
    """rank_pattern or alpha_pattern, read; its keys are expressions written by a stranger."""
    if not patterns:
        return []
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise _mismatch(field, f"is not an object of {MAX_PATTERNS} patterns at most")
    read = []
    for key, value in patterns.items():
        try:
            read.append((read_key(key), value))
        except BadPattern as error:
            raise _mismatch(field, f"has the pattern {key[:80]!r}, which {error}") from error
        if field == "alpha_pattern":
            _check_alpha(field, value)
        elif not _is_rank(value):
            raise _mismatch(field, f"has {repr(value)[:80]}, not a rank from 1 to {MAX_RANK}")
    return read
