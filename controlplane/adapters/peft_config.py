"""Read PEFT's adapter_config.json without trusting it.

Fails closed: a field is honoured, or known to change nothing once the adapter is trained, or
refused by name. The fields are those of peft 0.21's LoraConfig. Where PEFT takes a regular
expression, only names are taken here: a stranger's expression can take forever.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

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
# a claim, never something to fetch.
_NEUTRAL = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "qalora_group_size",
    "runtime_config",
})  # fmt: skip
# After any other (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) the base model is changed too, so the
# adapter's tensors are not all of it.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_ADVICE = {
    "target_parameters": "name linear layers in target_modules",
}
#: One part or several of a module's dotted path.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", re.ASCII)
#: The same as a key of rank_pattern: an expression, but without choices and repetitions.
_PLAIN_PATTERN = re.compile(r"\^?[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*\$?", re.ASCII)


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
    target_modules: tuple[str, ...]
    exclude_modules: tuple[str, ...]
    layers: frozenset[int] | None  # None: all
    rank_pattern: Sequence[tuple[re.Pattern[str], int]]
    rows: new_rows.NewRows

    def is_target(self, module: str, layer: int | None) -> bool:
        """Whether PEFT adapts the module, a dotted path such as model.layers.0.mlp.up_proj.

        layer  None: it is of no layer
        """
        if any(_names(name, module) for name in self.exclude_modules):
            return False
        if module in self.target_modules:  # a full path counts in whatever layer it is
            return True
        return any(_names(name, module) for name in self.target_modules) and (
            self.layers is None or layer in self.layers
        )

    def rank_of(self, module: str) -> int:
        for pattern, rank in self.rank_pattern:
            if pattern.match(module):
                return rank
        return self.rank


def parse_config(text: bytes, *, max_rank: int) -> LoraConfig:
    """The config, checked. Raises Rejected with everything that is wrong in it."""
    raw = _loads(text)
    reasons = _unsupported(raw)
    reader = _Reader(raw, reasons)
    config = LoraConfig(
        raw=raw,
        rank=reader.rank("r", raw.get("r"), max_rank),
        alpha=reader.alpha("lora_alpha", raw.get("lora_alpha")),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        target_modules=reader.names("target_modules", required=True),
        exclude_modules=reader.names("exclude_modules", required=False),
        layers=reader.layers(),
        rank_pattern=[
            (_as_in_peft(name), reader.rank(f"rank_pattern.{name}", value, max_rank))
            for name, value in reader.pattern("rank_pattern").items()
        ],
        rows=new_rows.read(raw, reasons),
    )
    # The engine scales by these; here they need only be right.
    for name, value in reader.pattern("alpha_pattern").items():
        reader.alpha(f"alpha_pattern.{name}", value)
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
    if raw.get("peft_type") != "LORA":
        reasons.append(Reason("peft_type", f"it is {shown(raw.get('peft_type'))}, not LORA"))
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        reasons.append(Reason("task_type", f"it is {shown(raw['task_type'])}, not CAUSAL_LM"))
    if raw.get("bias", "none") != "none":
        reasons.append(Reason("bias", "biases are not supported: train with bias none"))
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
                "save the adapter converted to a plain LoRA",
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

    def names(self, field: str, *, required: bool) -> tuple[str, ...]:
        value = self._raw.get(field)
        if not value and not required:
            return ()
        if not isinstance(value, list) or not value:
            self._complain(field, "it must be a list of module names; patterns are not supported")
            return ()
        for name in value:
            if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
                self._complain(field, f"{shown(name)} is not a module's name")
                return ()
        return tuple(dict.fromkeys(value))

    def pattern(self, field: str) -> dict[str, Any]:
        value = self._raw.get(field) or {}
        if not isinstance(value, dict):
            self._complain(field, "it must be an object of module names")
            return {}
        for name in value:
            if not _PLAIN_PATTERN.fullmatch(name):
                self._complain(field, f"{shown(name)} is not a module's name")
                return {}
        return value

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


def _names(name: str, module: str) -> bool:
    """Whether a name is the module's dotted path or a tail of it, cut at a dot."""
    return module == name or module.endswith(f".{name}")


def _as_in_peft(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _rejected(message: str) -> Rejected:
    return Rejected.because(FILE, message)
