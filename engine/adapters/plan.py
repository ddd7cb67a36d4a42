"""Does this PEFT adapter fit this base model? Pure functions over its config and tensor header.

Fails closed: every tensor of the file is consumed exactly once, and every shape must fit. An
adapter that passes is applied exactly as PEFT applies it. What the config may say is in
engine/adapters/config.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.adapters.config import ModuleRules, check_config
from engine.adapters.rows import Replacement, RowTensors
from engine.errors import AdapterMismatch
from engine.model.config import ModelConfig

MAX_HEADER_BYTES = 16 << 20

PROJECTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Beside the seven projections of a layer, an adapter may change these. They come before the first
# layer and after the last.
EMBEDDING, HEAD = 7, 8
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\."
    r"(?P<block>self_attn|mlp)\.(?P<name>[a-z]+_proj)|model\.embed_tokens|lm_head)\."
    r"(?:(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?P<leaf>\.weight|\.bias|)|(?P<rows>token_adapter\.trainable_tokens_delta)"
    r"(?:\.default)?|(?P<base>base_layer\.)?weight)",
    re.ASCII,
)
# (tensor, is of the embedding) -> part; a magnitude's ".weight" comes and goes with PEFT's version.
_PARTS = {
    ("lora_A.weight", False): "A",
    ("lora_B.weight", False): "B",
    ("lora_B.bias", False): "bias",
    ("lora_embedding_A", True): "A",
    ("lora_embedding_B", True): "B",
    ("lora_magnitude_vector", False): "magnitude",
    ("lora_magnitude_vector", True): "magnitude",
    ("lora_magnitude_vector.weight", False): "magnitude",
    ("lora_magnitude_vector.weight", True): "magnitude",
}


class Site(NamedTuple):
    """Which matrix of the base: a projection of a layer, or EMBEDDING or HEAD."""

    layer: int
    projection: int

    @property
    def module(self) -> str:
        """Its dotted path in Hugging Face's model."""
        if self.projection >= EMBEDDING:
            return "lm_head" if self.projection == HEAD else "model.embed_tokens"
        block = "self_attn" if self.projection < 4 else "mlp"
        return f"model.layers.{self.layer}.{block}.{PROJECTION_NAMES[self.projection]}"

    def widths(self, model: ModelConfig) -> tuple[int, int]:
        """(in, out) of the matrix; the embedding's `in` is the vocabulary."""
        if self.projection == EMBEDDING:
            return model.vocab_size, model.hidden_size
        if self.projection == HEAD:
            return model.hidden_size, model.vocab_size
        return model.projection_widths[self.projection]

    def has_bias(self, model: ModelConfig) -> bool:
        """Whether the base adds a bias to the product."""
        if self.projection >= EMBEDDING:
            return False
        return (*[model.qkv_bias] * 3, model.o_bias, *[model.mlp_bias] * 3)[self.projection]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One adapted matrix, and its tensors in the file.

    a_name     A [rank, in]
    b_name     B [out, rank]
    magnitude  [out], of DoRA; None: plain LoRA
    bias       [out], added to B A x before it is scaled; None: there is none
    """

    site: Site
    rank: int
    scaling: float
    a_name: str
    b_name: str
    magnitude: str | None = None
    bias: str | None = None

    @property
    def layer(self) -> int:
        return self.site.layer

    @property
    def projection(self) -> int:
        return self.site.projection

    def has_shift(self, model: ModelConfig) -> bool:
        """Whether a vector is added to the product, see `engine.adapters.values.AppliedValues`."""
        return self.bias is not None or (self.magnitude is not None and self.site.has_bias(model))

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.a_name, self.b_name, self.magnitude, self.bias)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """What an adapter changes; all that is needed to place it in memory.

    targets     projections of layers, in layer order
    embedding   of the token embedding, if it is changed
    head        of the last matrix, if it is changed
    new_embedding, new_head   rows that replace the base's; what LoRA adds is added to them. Equal
                ones are one and the same
    copies      tensors that repeat a matrix of the base, as PEFT writes them beside an adapted
                embedding or head: name -> its place; they must equal it
    is_tied     PEFT made the head's A and B from the embedding's; they must agree
    """

    targets: tuple[Target, ...]
    embedding: Target | None = None
    head: Target | None = None
    copies: Mapping[str, Site]
    is_tied: bool = False
    new_embedding: Replacement | None = None
    new_head: Replacement | None = None
    file_bytes: int

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """Every one, in the order in which a forward pass needs them."""
        ends = (self.embedding,), self.targets, (self.head,)
        return tuple(target for part in ends for target in part if target is not None)

    @property
    def max_rank(self) -> int:
        return max(target.rank for target in self.all_targets)


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
    patterns = check_config(config)
    shape_of_all = model.vocab_size, model.hidden_size
    rows = RowTensors(config, *shape_of_all, is_tied=model.tie_embeddings)
    sites: dict[Site, dict[str, str]] = {}
    copies: dict[str, Site] = {}
    for name, (_, shape) in tensors.items():
        site, part = _locate(name, model)
        if part == "rows" or (part == "matrix" and site.module in rows.saved):
            rows.note(name, site.module, shape, is_whole=part == "matrix")
        elif part in ("copy", "matrix"):
            _check_shape(name, shape, shape_of_all)
            copies[name] = site
        else:
            parts = sites.setdefault(site, {})
            if part in parts:
                raise AdapterMismatch(f"tensor {name} repeats {parts[part]}", param=name)
            parts[part] = name
    if not sites:
        raise AdapterMismatch("adapter_model.safetensors has no tensors")
    rows.check(
        adapted={site.module: next(iter(parts.values())) for site, parts in sites.items()},
        copies={site.module: name for name, site in copies.items()},
    )
    is_tied = _is_tied(config, sites, model)
    every = _sites(model)
    rules = ModuleRules(config, patterns, {site.module: layer for site, layer in every.items()})
    _check_bias(config, rules, every, model)
    targets = [
        _target(config, rules, tensors, model, site, sites[site], is_tied) for site in sorted(sites)
    ]
    _check_complete(config, rules, (site for site in every if site.module not in rows.saved), sites)
    ends = {target.projection: target for target in targets if target.projection >= EMBEDDING}
    return AdapterPlan(
        targets=tuple(target for target in targets if target.projection < EMBEDDING),
        embedding=ends.get(EMBEDDING),
        head=ends.get(HEAD),
        copies=copies,
        is_tied=is_tied,
        new_embedding=rows.embedding,
        new_head=rows.head,
        file_bytes=file_bytes,
    )


def _locate(name: str, model: ModelConfig) -> tuple[Site, str]:
    """The matrix that a tensor belongs to, and which part of it.

    A, B, magnitude, bias; rows of some tokens; a whole matrix; a copy of the base's.
    """
    match = _TENSOR_NAME.fullmatch(name)
    if match is None:
        raise AdapterMismatch(f"tensor {name} is not one of a supported kind", param=name)
    if match["layer"] is None:
        is_embedding = match["module"] != "lm_head"
        site = Site(-1, EMBEDDING) if is_embedding else Site(model.num_layers, HEAD)
    else:
        is_embedding = False
        projection = (*PROJECTION_NAMES, match["name"]).index(match["name"])
        site = Site(int(match["layer"]), projection)
        if projection == len(PROJECTION_NAMES) or site.module != match["module"]:
            raise AdapterMismatch(f"tensor {name} is not one of a supported kind", param=name)
        if site.layer >= model.num_layers:
            raise AdapterMismatch(
                f"tensor {name} is of layer {site.layer}; the base has {model.num_layers}",
                param=name,
            )
    if match["part"] is None:
        whole = "rows" if match["rows"] else "copy" if match["base"] else "matrix"
        part = None if match["layer"] else whole
    else:
        part = _PARTS.get((match["part"] + match["leaf"], is_embedding))
    if part is None:
        raise AdapterMismatch(f"tensor {name} is not one of a supported kind", param=name)
    return site, part


def _is_tied(
    config: Mapping[str, Any], sites: Mapping[Site, Mapping[str, str]], model: ModelConfig
) -> bool:
    """Whether PEFT makes the head's A and B from the embedding's. Then the file has both."""
    embedding, head = Site(-1, EMBEDDING), Site(model.num_layers, HEAD)
    if not (config.get("ensure_weight_tying") and model.tie_embeddings):
        return False
    if (embedding in sites) != (head in sites):
        raise AdapterMismatch(
            "ensure_weight_tying: the file has tensors of only one of embed_tokens and lm_head",
            param="ensure_weight_tying",
        )
    return embedding in sites


def _sites(model: ModelConfig) -> dict[Site, int | None]:
    """Every matrix that can be adapted, and the layer that it is of; None: of no layer."""
    inner = {
        Site(layer, projection): layer
        for layer in range(model.num_layers)
        for projection in range(len(PROJECTION_NAMES))
    }
    return {Site(-1, EMBEDDING): None, **inner, Site(model.num_layers, HEAD): None}


def _check_bias(
    config: Mapping[str, Any], rules: ModuleRules, every: Iterable[Site], model: ModelConfig
) -> None:
    """Raise AdapterMismatch when `bias` says that biases of the base were trained."""
    mode = config.get("bias", "none")
    if mode == "none":
        return
    for site in every:
        if site.has_bias(model) and (mode == "all" or rules.is_target(site.module)):
            raise AdapterMismatch(
                f"adapter_config.json: bias is {mode!r}, and the base's {site.module} has a bias: "
                "train with bias 'none'",
                param="bias",
            )


def _target(
    config: Mapping[str, Any],
    rules: ModuleRules,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    model: ModelConfig,
    site: Site,
    parts: Mapping[str, str],
    is_tied: bool,
) -> Target:
    module = site.module
    # PEFT takes a tied head out of target_modules: it goes where the embedding goes.
    named = "model.embed_tokens" if is_tied and site.projection == HEAD else module
    if not rules.is_target(named):
        raise AdapterMismatch(
            f"tensor {next(iter(parts.values()))} is of a module that target_modules does not name"
            " or exclude_modules does",
            param="target_modules",
        )
    _check_parts(config, site, parts)
    rank, alpha = rules.rank(module), rules.alpha(module)
    in_width, out_width = site.widths(model)
    shapes = {
        "A": (rank, in_width),
        "B": (out_width, rank),
        "magnitude": (out_width,),
        "bias": (out_width,),
    }
    for part, name in parts.items():
        _check_shape(name, tensors[name][1], shapes[part], rank)
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Target(
        site=site,
        rank=rank,
        scaling=alpha / divisor,
        a_name=parts["A"],
        b_name=parts["B"],
        magnitude=parts.get("magnitude"),
        bias=parts.get("bias"),
    )


def _check_complete(
    config: Mapping[str, Any],
    rules: ModuleRules,
    every: Iterable[Site],
    sites: Mapping[Site, Mapping[str, str]],
) -> None:
    """Raise AdapterMismatch when a module that target_modules means has no tensors."""
    if config.get("target_modules") is None:
        return
    for site in every:
        if site not in sites and rules.is_target(site.module):
            raise AdapterMismatch(
                f"adapter_model.safetensors has no tensors of {site.module}, which target_modules "
                "names",
                param="target_modules",
            )


def _check_parts(config: Mapping[str, Any], site: Site, parts: Mapping[str, str]) -> None:
    """Raise AdapterMismatch unless exactly the parts are there that the config asks for."""
    if config.get("lora_bias") and site.projection == EMBEDDING:
        raise AdapterMismatch("lora_bias is not supported for embed_tokens", param="lora_bias")
    wanted = {"A", "B"}
    if config.get("use_dora"):
        wanted.add("magnitude")
    if config.get("lora_bias"):
        wanted.add("bias")
    for part in sorted(parts.keys() - wanted):
        field = "use_dora" if part == "magnitude" else "lora_bias"
        raise AdapterMismatch(
            f"tensor {parts[part]} is there although {field} is off", param=parts[part]
        )
    for part in sorted(wanted - parts.keys()):
        name = next(iter(parts.values()))
        raise AdapterMismatch(
            f"tensor {name} has no counterpart: the {part} of {site.module} is missing", param=name
        )


def _check_shape(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...], rank: int | None = None
) -> None:
    if shape != wanted:
        needs = "the base needs" if rank is None else f"the base and rank {rank} need"
        raise AdapterMismatch(
            f"tensor {name} has shape {list(shape)}; {needs} {list(wanted)}", param=name
        )
