"""Read PEFT's adapter_config.json without trusting it, at upload and in the engine.

Fails closed: a field is applied, or known to change nothing once the adapter is trained, or
refused by name (`peft_fields`). Regular expressions mean what they mean to PEFT, and are never run
by Python: a stranger's can take forever (`module_patterns`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contract.adapters.base_shape import EMBEDDING, HEAD
from contract.adapters.file_kinds import other_kind
from contract.adapters.module_patterns import (
    BadPattern,
    ModuleNames,
    Pattern,
    read_key,
    read_pattern,
)
from contract.adapters.peft_fields import PLAIN_INITS, init_problem, other_method, refusals
from contract.adapters.problems import AdapterProblems, Problem, shown
from contract.strict_json import read_object

FILE = "adapter_config.json"
MAX_RANK = 256
#: Largest number of keys of rank_pattern, and of alpha_pattern.
MAX_PATTERNS = 2048
#: Defaults of PEFT's LoraConfig for keys that an adapter_config.json leaves out.
DEFAULT_RANK = 8
DEFAULT_ALPHA = 8
_BIAS_MODES = ("none", "all", "lora_only")
_MAX_LAYERS = 1000

#: One part or several of a module's dotted path.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", re.ASCII)
_ALL_LINEAR = "all-linear"

#: Names that modules_to_save and trainable_token_indices may contain -> the module's dotted path.
_WITH_ROWS = {"embed_tokens": EMBEDDING, EMBEDDING: EMBEDDING, HEAD: HEAD}
SAVE_FIELD, TOKENS_FIELD = "modules_to_save", "trainable_token_indices"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds of a config.

    max_bytes  of the file
    max_rank   of any module
    max_alpha  of any module, of either sign
    is_strict  as a platform reads the files of its tenants: target_modules is there, lists hold
               names of modules, alphas are above 0, and layers are from 0 to 999
    """

    max_bytes: int
    max_rank: int = MAX_RANK
    max_alpha: float
    is_strict: bool


#: Beyond 1e38 an alpha has no fp32 number, and adapters are scaled in fp32.
ENGINE_LIMITS = Limits(max_bytes=1 << 20, max_alpha=1e38, is_strict=False)
UPLOAD_LIMITS = Limits(max_bytes=64 << 10, max_alpha=1e6, is_strict=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The fields of an adapter_config.json that decide the adapter's effect.

    target_modules  names or an expression; None if missing
    target_parameters  names of experts' stacked matrices
    layers          None: all
    saved           modules that are replaced whole, by their dotted paths
    token_ids       module -> the tokens whose rows are replaced
    """

    raw: dict[str, Any]
    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    ensure_weight_tying: bool
    bias: str
    target_modules: tuple[str, ...] | Pattern | None
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...] | Pattern
    layers: frozenset[int] | None
    rank_pattern: Sequence[tuple[Pattern, int]]
    alpha_pattern: Sequence[tuple[Pattern, float]]
    saved: frozenset[str]
    token_ids: Mapping[str, tuple[int, ...]]

    def over(self, modules: Mapping[str, int | None]) -> AdaptedModules:
        """Return the modules of a base that PEFT adapts.

        modules  dotted path, such as model.layers.0.mlp.up_proj -> its layer; None: of no layer
        Raises AdapterProblems when the patterns take too long.
        Sources: check_target_module_exists and _maybe_include_all_linear_layers in
        peft/tuners/tuners_utils.py.
        """
        names = ModuleNames(modules)
        field = "rank_pattern"
        try:
            ranks = names.first(self.rank_pattern)
            field = "alpha_pattern"
            alphas = names.first(self.alpha_pattern)
            field = "exclude_modules"
            excluded = _matching(names, self.exclude_modules, modules)
            field = "target_modules"
            targets = self._targets(names, modules)
        except BadPattern as error:
            raise AdapterProblems([Problem(FILE, field, f"it {error}")]) from error
        return AdaptedModules(self, targets=targets - excluded, ranks=ranks, alphas=alphas)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Return the names in target_modules; none if it is an expression."""
        if not isinstance(self.target_modules, tuple) or self.target_modules == (_ALL_LINEAR,):
            return ()
        return self.target_modules

    def _targets(self, names: ModuleNames, modules: Mapping[str, int | None]) -> frozenset[str]:
        if self.target_modules is None:
            return frozenset(modules)
        if self.target_modules == (_ALL_LINEAR,):  # without the head, in PEFT too
            return frozenset(name for name, layer in modules.items() if layer is not None)
        found = _matching(names, self.target_modules, modules)
        if self.layers is None or isinstance(self.target_modules, Pattern):
            return found
        # A full path counts in every layer.
        return frozenset(
            name for name in found if modules[name] in self.layers or name in self.target_modules
        )


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptedModules:
    """The modules of one base that a config adapts, and the ranks and alphas that differ."""

    config: LoraConfig
    targets: frozenset[str]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank(self, module: str) -> int:
        return self.ranks.get(module, self.config.rank)

    def scaling(self, module: str) -> float:
        """Return the factor of B A x."""
        rank = self.rank(module)
        divisor = math.sqrt(rank) if self.config.use_rslora else rank
        return self.alphas.get(module, self.config.alpha) / divisor


def _matching(
    names: ModuleNames, wanted: tuple[str, ...] | Pattern, modules: Mapping[str, int | None]
) -> frozenset[str]:
    """Return the modules that an expression matches, or whose path ends with a wanted name."""
    if isinstance(wanted, Pattern):
        return names.whole(wanted)
    listed = frozenset(wanted)
    return frozenset(module for module in modules if listed and is_listed(module, listed))


def is_listed(module: str, names: frozenset[str]) -> bool:
    tail, dot = module, "."
    while dot:
        if tail in names:
            return True
        _, dot, tail = tail.partition(".")
    return False


def load_json(text: bytes, max_bytes: int) -> dict[str, Any]:
    """Parse the file. Raises AdapterProblems if it is no object or longer than `max_bytes`."""
    if len(text) > max_bytes:
        raise _bad_file(f"it is longer than {max_bytes} bytes")
    if (kind := other_kind(text)) is not None:
        raise _bad_file(kind)
    try:
        raw = read_object(text)
        # JSON can contain a lone surrogate, but it can be neither stored nor hashed.
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _bad_file("it has a lone surrogate, which is not a character") from error
    except ValueError as error:
        raise _bad_file(f"it {error}") from error
    return raw


def _bad_file(message: str) -> AdapterProblems:
    return AdapterProblems([Problem(FILE, "", message)])


def read_config(raw: Mapping[str, Any], limits: Limits) -> LoraConfig:
    """Check a config. Raises AdapterProblems with everything that is wrong in it."""
    if raw.get("peft_type") != "LORA":  # the other fields belong to another method
        raise AdapterProblems([Problem(FILE, *other_method(raw))])
    reader = _Reader(raw, limits)
    reader.refuse_unsupported()
    config = LoraConfig(
        raw=dict(raw),
        rank=reader.rank("r", raw.get("r", DEFAULT_RANK)),
        alpha=reader.alpha("lora_alpha", raw.get("lora_alpha", DEFAULT_ALPHA)),
        use_rslora=reader.flag("use_rslora"),
        use_dora=reader.flag("use_dora"),
        lora_bias=reader.flag("lora_bias"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        bias=raw.get("bias", "none"),
        layers=reader.layers(),
        target_modules=reader.target_modules(),
        target_parameters=reader.target_parameters(),
        exclude_modules=reader.modules("exclude_modules") if raw.get("exclude_modules") else (),
        rank_pattern=reader.patterns("rank_pattern", reader.rank),
        alpha_pattern=reader.patterns("alpha_pattern", reader.alpha),
        saved=reader.saved(),
        token_ids=reader.token_ids(),
    )
    if reader.problems:
        raise AdapterProblems(reader.problems)
    return config


class _Reader:
    """Reads typed values from the raw config; faults are added to `problems`."""

    def __init__(self, raw: Mapping[str, Any], limits: Limits) -> None:
        self._raw, self._limits = raw, limits
        self.problems: list[Problem] = []

    def _complain(self, field: str, message: str) -> None:
        self.problems.append(Problem(FILE, shown(field) or '""', message))

    def refuse_unsupported(self) -> None:
        """Refuse fields with an effect that is not supported, unless they are off or empty."""
        raw = self._raw
        for field, message in refusals(raw):
            self._complain(field, message)
        if raw.get("task_type") not in (None, "CAUSAL_LM"):
            self._complain("task_type", f"it is {shown(raw['task_type'])}, not CAUSAL_LM")
        if raw.get("bias", "none") not in _BIAS_MODES:
            modes = ", ".join(_BIAS_MODES)
            self._complain("bias", f"it is {shown(raw['bias'])}, not one of {modes}")
        init = raw.get("init_lora_weights", True)
        # As PEFT's LoraConfig has it.
        if raw.get("lora_bias") and raw.get("use_dora"):
            self._complain("lora_bias", "it cannot be combined with use_dora: turn one of them off")
        if raw.get("lora_bias") and not isinstance(init, bool):
            self._complain("lora_bias", "it needs init_lora_weights to be true or false")
        if init == "mica" and raw.get("use_dora"):
            self._complain(
                "init_lora_weights", "mica cannot be combined with use_dora: turn one of them off"
            )
        if not isinstance(init, bool | str | None) or init not in PLAIN_INITS:
            self._complain("init_lora_weights", init_problem(init))

    def rank(self, field: str, value: Any, of: str = "") -> int:
        highest = self._limits.max_rank
        if type(value) is int and 1 <= value <= highest:
            return value
        self._complain(field, f"it is {shown(value)}{of}, not a rank from 1 to {highest}")
        return 1

    def alpha(self, field: str, value: Any, of: str = "") -> float:
        most, is_strict = self._limits.max_alpha, self._limits.is_strict
        if type(value) in (int, float) and -most <= value <= most:
            number: float = value
            if number > 0 or not is_strict:
                return number
        needed = "above 0, at most" if is_strict else "up to"
        self._complain(field, f"it is {shown(value)}{of}, not a number {needed} {most:g}")
        return 1.0

    def flag(self, field: str) -> bool:
        value = self._raw.get(field)
        if not isinstance(value, bool | None):
            self._complain(field, f"it is {shown(value)}, neither true nor false")
        return value is True

    def target_parameters(self) -> tuple[str, ...]:
        value = self._raw.get("target_parameters")
        return self._names("target_parameters", value, "a parameter") if value else ()

    def target_modules(self) -> tuple[str, ...] | Pattern | None:
        value = self._raw.get("target_modules")
        if not value and self._raw.get("target_parameters"):
            return ()
        if value is None and not self._limits.is_strict:
            return None
        if isinstance(value, str):
            for other in ("layers_to_transform", "layers_pattern"):
                if self._raw.get(other) not in (None, [], ""):
                    message = "it works only with a list of target_modules"
                    self._complain(other, message)
            if value.lower() == _ALL_LINEAR:
                return (_ALL_LINEAR,)
        return self.modules("target_modules")

    def modules(self, field: str) -> tuple[str, ...] | Pattern:
        """Read names, or an expression."""
        value = self._raw.get(field)
        if isinstance(value, str) and value:
            return self._pattern(field, value, read_pattern) or ()
        if not isinstance(value, list) or not value:
            self._complain(field, "it must be a list of module names or a regular expression")
            return ()
        return self._names(field, value, "a module")

    def _names(self, field: str, value: Any, of: str) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._complain(field, f"it must be a list of names of {of.split()[1]}s")
            return ()
        for name in value:
            is_name = isinstance(name, str)
            if not is_name or (self._limits.is_strict and not _PLAIN_NAME.fullmatch(name)):
                self._complain(field, f"{shown(name)} is not {of}'s name")
                return ()
        return tuple(dict.fromkeys(value))

    def patterns(
        self, field: str, read_value: Callable[[str, Any, str], Any]
    ) -> list[tuple[Pattern, Any]]:
        value = self._raw.get(field) or {}
        if not isinstance(value, dict):
            self._complain(field, "it must be an object of module names")
            return []
        if len(value) > MAX_PATTERNS:
            self._complain(field, f"it has {len(value)} patterns; {MAX_PATTERNS} is the limit")
            return []
        read = []
        for key, number in value.items():
            pattern = self._pattern(field, key, read_key)
            if pattern is None:
                return []
            read.append((pattern, read_value(field, number, f" for {shown(key)}")))
        return read

    def _pattern(self, field: str, text: str, read: Callable[[str], Pattern]) -> Pattern | None:
        try:
            return read(text)
        except BadPattern as error:
            self._complain(field, f"the pattern {shown(text)} {shown(str(error))}")
            return None

    def layers(self) -> frozenset[int] | None:
        if self._raw.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
            self._complain(
                "layers_pattern", "it must be a layer number or a list of them; otherwise remove it"
            )
        value = self._raw.get("layers_to_transform")
        if value is None or value == []:
            return None
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in values) or (
            self._limits.is_strict and not all(0 <= layer < _MAX_LAYERS for layer in values)
        ):
            self._complain("layers_to_transform", "it must be a list of layer numbers")
            return None
        return frozenset(values)

    def saved(self) -> frozenset[str]:
        names = self._raw.get(SAVE_FIELD) or []
        if not isinstance(names, list):
            self._complain(SAVE_FIELD, "it must be a list of module names")
            return frozenset()
        found = [self._with_rows(SAVE_FIELD, name) for name in names]
        return frozenset(path for path in found if path is not None)

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        given = self._raw.get(TOKENS_FIELD) or {}
        if isinstance(given, list):
            given = {EMBEDDING: given}
        if not isinstance(given, dict):
            self._complain(TOKENS_FIELD, "it must be a list of tokens, or an object of lists")
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for name, ids in given.items():
            path = self._with_rows(TOKENS_FIELD, name)
            if path is None:
                continue
            is_list = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
            if not is_list or len(set(ids)) < len(ids):
                self._complain(TOKENS_FIELD, f"{shown(name)} needs a list of different tokens")
            elif path in found:
                self._complain(TOKENS_FIELD, f"it names {path} twice")
            else:
                found[path] = tuple(ids)
        return found

    def _with_rows(self, field: str, name: Any) -> str | None:
        path = _WITH_ROWS.get(name) if isinstance(name, str) else None
        if path is None:
            self._complain(field, f"{shown(name)}: only embed_tokens and lm_head are supported")
        return path
