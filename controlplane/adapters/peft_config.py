"""Read PEFT's adapter_config.json without trusting it.

Fails closed: a field is honoured, or known to change nothing once the adapter is trained, or
refused by name. The fields are those of peft 0.21's LoraConfig. Regular expressions mean what they
mean to PEFT, and are never run by Python: a stranger's can take forever (`contract`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from contract.adapter_limits import BIAS_MODES, DEFAULT_ALPHA, DEFAULT_RANK, MAX_PATTERNS, MAX_RANK
from contract.module_patterns import (
    BadPattern,
    ModuleNames,
    Pattern,
    read_key,
    read_pattern,
)
from controlplane.adapters import new_rows
from controlplane.adapters.rejection import Reason, Rejected, shown

FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 64 * 1024
_MAX_ALPHA = 1e6
_MAX_LAYERS = 1000

_HONOURED = frozenset({
    "peft_type", "task_type", "bias", "init_lora_weights", "r", "lora_alpha", "use_rslora",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_dora", "lora_bias", "ensure_weight_tying", "modules_to_save",
    "trainable_token_indices",
})  # fmt: skip
# They say how the adapter was trained, or where its base came from: `base_model_name_or_path` is
# a claim, never something to fetch. An initialisation's own stay when PEFT converts to plain LoRA.
_NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config",
})  # fmt: skip
# After any other (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) the base model is changed too, so the
# adapter's tensors are not all of it.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_ADVICE = {
    "target_parameters": "name linear layers in target_modules",
}
#: One part or several of a module's dotted path.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", re.ASCII)
_ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What of an adapter_config.json decides the adapter's effect."""

    raw: dict[str, Any]
    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    ensure_weight_tying: bool
    bias: str
    target_modules: tuple[str, ...] | Pattern
    exclude_modules: tuple[str, ...] | Pattern
    layers: frozenset[int] | None  # None: all
    rank_pattern: Sequence[tuple[Pattern, int]]
    alpha_pattern: Sequence[tuple[Pattern, float]]
    rows: new_rows.NewRows

    def over(self, modules: Mapping[str, int | None]) -> AdaptedModules:
        """What PEFT adapts of a base.

        modules  dotted path, such as model.layers.0.mlp.up_proj -> its layer; None: of no layer
        Raises Rejected when the patterns take too long.
        """
        names = ModuleNames(modules)
        field = "rank_pattern"
        try:
            ranks = names.first(self.rank_pattern)
            field = "alpha_pattern"  # the engine scales by these; here they need only be right
            names.first(self.alpha_pattern)
            field = "exclude_modules"
            excluded = _matching(names, self.exclude_modules, modules)
            field = "target_modules"
            targets = self._targets(names, modules)
        except BadPattern as error:
            raise Rejected.because(field, f"it {error}") from error
        return AdaptedModules(targets=targets - excluded, ranks=ranks, rank=self.rank)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Those listed in target_modules; none of an expression."""
        if isinstance(self.target_modules, Pattern) or self.target_modules == (_ALL_LINEAR,):
            return ()
        return self.target_modules

    def _targets(self, names: ModuleNames, modules: Mapping[str, int | None]) -> frozenset[str]:
        if self.target_modules == (_ALL_LINEAR,):
            return frozenset(name for name, layer in modules.items() if layer is not None)
        found = _matching(names, self.target_modules, modules)
        if self.layers is None or isinstance(self.target_modules, Pattern):
            return found
        # A full path counts in whatever layer it is.
        return frozenset(
            name for name in found if modules[name] in self.layers or name in self.target_modules
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedModules:
    """The modules of one base that a config adapts; `rank` where `ranks` has no other."""

    targets: frozenset[str]
    ranks: Mapping[str, int]
    rank: int

    def rank_of(self, module: str) -> int:
        return self.ranks.get(module, self.rank)


def parse_config(text: bytes, *, max_rank: int) -> LoraConfig:
    """The config, checked. Raises Rejected with everything that is wrong in it."""
    raw = _loads(text)
    max_rank = min(max_rank, MAX_RANK)  # the engine's
    if raw.get("peft_type") != "LORA":  # then the other fields are another method's
        found = f"it is {shown(raw['peft_type'])}" if "peft_type" in raw else "it is missing"
        raise Rejected.because("peft_type", f"{found}; only LORA is served: train a LoRA adapter")
    reasons = _unsupported(raw)
    reader = _Reader(raw, reasons)
    config = LoraConfig(
        raw=raw,
        rank=reader.rank("r", raw.get("r", DEFAULT_RANK), max_rank),
        alpha=reader.alpha("lora_alpha", raw.get("lora_alpha", DEFAULT_ALPHA)),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        bias=raw.get("bias", "none"),
        target_modules=reader.modules("target_modules", required=True),
        exclude_modules=reader.modules("exclude_modules", required=False),
        layers=reader.layers(),
        rank_pattern=[
            (pattern, reader.rank(f"rank_pattern.{pattern.text}", value, max_rank))
            for pattern, value in reader.patterns("rank_pattern")
        ],
        alpha_pattern=[
            (pattern, reader.alpha(f"alpha_pattern.{pattern.text}", value))
            for pattern, value in reader.patterns("alpha_pattern")
        ],
        rows=new_rows.read(raw, reasons),
    )
    if reasons:
        raise Rejected(reasons)
    return config


def _loads(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise _rejected(f"it is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_float=_finite,
            parse_constant=_no_constant,
        )
        # A lone surrogate can be written in JSON, but neither stored nor hashed.
        json.dumps(raw, ensure_ascii=False).encode()
    except RecursionError as error:
        raise _rejected("it is nested too deeply") from error
    except ValueError as error:
        raise _rejected(f"it is not JSON: {shown(str(error))}") from error
    if not isinstance(raw, dict):
        raise _rejected("it is not a JSON object")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _rejected("it has a field twice")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unsupported(raw: dict[str, Any]) -> list[Reason]:
    """The fields with a meaning of their own that is not served; off and empty ones pass."""
    reasons = []
    for field, value in raw.items():
        if value and field not in _HONOURED | _NEUTRAL:
            advice = _ADVICE.get(field, "train without it")
            reasons.append(Reason(shown(field), f"it is not supported: {advice}"))
    if raw.get("auto_mapping"):
        reasons.append(Reason("auto_mapping", "custom model classes are not supported"))
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        reasons.append(Reason("task_type", f"it is {shown(raw['task_type'])}, not CAUSAL_LM"))
    if raw.get("bias", "none") not in BIAS_MODES:
        modes = ", ".join(BIAS_MODES)
        reasons.append(Reason("bias", f"it is {shown(raw['bias'])}, not one of {modes}"))
    init = raw.get("init_lora_weights", True)
    # As PEFT's LoraConfig has it.
    if raw.get("lora_bias") and raw.get("use_dora"):
        reasons.append(Reason("lora_bias", "it does not go together with use_dora"))
    if raw.get("lora_bias") and not isinstance(init, bool):
        reasons.append(Reason("lora_bias", "it needs init_lora_weights to be true or false"))
    if not isinstance(init, bool | str | None) or init not in _PLAIN_INITS:
        reasons.append(
            Reason(
                "init_lora_weights",
                f"{shown(init)} changes the base model too: "
                "save the adapter with path_initial_model_for_weight_conversion, which makes it a "
                "plain LoRA",
            )
        )
    return reasons


class _Reader:
    """Takes typed values out of the raw config; what is wrong is added to `reasons`."""

    def __init__(self, raw: dict[str, Any], reasons: list[Reason]) -> None:
        self._raw = raw
        self._reasons = reasons

    def _complain(self, field: str, message: str) -> None:
        self._reasons.append(Reason(shown(field), message))

    def rank(self, field: str, value: Any, max_rank: int) -> int:
        if type(value) is int and 1 <= value <= max_rank:
            return value
        self._complain(field, f"it is {shown(value)}, not a rank from 1 to {max_rank}")
        return 1

    def alpha(self, field: str, value: Any) -> float:
        if type(value) in (int, float) and 0 < value <= _MAX_ALPHA:
            return float(value)
        self._complain(field, f"it is {shown(value)}, not a number above 0, at most {_MAX_ALPHA:g}")
        return 1.0

    def flag(self, field: str) -> bool:
        value = self._raw.get(field)
        if not isinstance(value, bool | None):
            self._complain(field, f"it is {shown(value)}, neither true nor false")
        return value is True

    def modules(self, field: str, *, required: bool) -> tuple[str, ...] | Pattern:
        """Names, or an expression."""
        value = self._raw.get(field)
        if not value and not required:
            return ()
        if isinstance(value, str) and value:
            return self._expression(field, value)
        if not isinstance(value, list) or not value:
            self._complain(field, "it must be a list of module names or a regular expression")
            return ()
        for name in value:
            if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
                self._complain(field, f"{shown(name)} is not a module's name")
                return ()
        return tuple(dict.fromkeys(value))

    def _expression(self, field: str, value: str) -> tuple[str, ...] | Pattern:
        if field == "target_modules":
            for other in ("layers_to_transform", "layers_pattern"):
                if self._raw.get(other) not in (None, [], ""):
                    self._complain(other, "it goes with a list of target_modules only")
            if value.lower() == _ALL_LINEAR:
                return (_ALL_LINEAR,)
        try:
            return read_pattern(value)
        except BadPattern as error:
            self._complain(field, f"the pattern {shown(value)} {shown(str(error))}")
            return ()

    def patterns(self, field: str) -> list[tuple[Pattern, Any]]:
        value = self._raw.get(field) or {}
        if not isinstance(value, dict):
            self._complain(field, "it must be an object of module names")
            return []
        if len(value) > MAX_PATTERNS:
            self._complain(field, f"it has {len(value)} patterns; {MAX_PATTERNS} is the limit")
            return []
        read = []
        for key, number in value.items():
            try:
                read.append((read_key(key), number))
            except BadPattern as error:
                self._complain(field, f"the pattern {shown(key)} {shown(str(error))}")
                return []
        return read

    def layers(self) -> frozenset[int] | None:
        if self._raw.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
            self._complain("layers_pattern", "it must be layers, or not be there")
        value = self._raw.get("layers_to_transform")
        if value is None or value == []:
            return None
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        if not all(type(layer) is int and 0 <= layer < _MAX_LAYERS for layer in values):
            self._complain("layers_to_transform", "it must be a list of layer numbers")
            return None
        return frozenset(values)


def _matching(
    names: ModuleNames, wanted: tuple[str, ...] | Pattern, modules: Mapping[str, int | None]
) -> frozenset[str]:
    """The modules that an expression matches, or whose dotted path ends with a wanted name."""
    if isinstance(wanted, Pattern):
        return names.whole(wanted)
    listed = frozenset(wanted)
    return frozenset(module for module in modules if listed and _is_listed(module, listed))


def _is_listed(module: str, names: frozenset[str]) -> bool:
    tail, dot = module, "."
    while dot:
        if tail in names:
            return True
        _, dot, tail = tail.partition(".")
    return False


def _rejected(message: str) -> Rejected:
    return Rejected.because(FILE, message)
