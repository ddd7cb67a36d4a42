"""ModelConfig: what the engine reads of the base model's config.json.

It fails closed: it refuses, by name, a family that has no file in `engine.model.families`, and a
field that neither that file nor this one reads. A missing field has the default of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contract.adapters.base_shape import BaseShape
from contract.adapters.families import (
    DELTA_IN,
    DELTA_OUT,
    FAMILIES,
    MLP,
    QKV,
    O,
    has_images,
    text_config,
)
from contract.layer_shapes import LayerShape
from engine.errors import UnsupportedModel
from engine.model.families import PLANS
from engine.model.fields import NEUTRAL, Fields
from engine.model.kv_layers import KvLayers
from engine.model.plan import Plan
from engine.model.quantization import Fp8Scheme, Int4Scheme, read_scheme

_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
# Fields beside text_config that do not change what the text model computes.
_AROUND_TEXT = frozenset({
    "boi_token_index", "eoi_token_index", "image_token_id", "image_token_index",
    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
    "spatial_merge_size", "text_config", "tie_word_embeddings", "video_token_id", "vision_config",
    "vision_end_token_id", "vision_feature_layer", "vision_start_token_id",
})  # fmt: skip
# Those of a model that hears, too.
_AROUND_AUDIO = frozenset({
    "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_index",
    "eoi_token_id",
})  # fmt: skip

# A layer's linears, in the order of the model -> their places in `kernels.Projection`.
_ATTENTION = {name: index for index, name in enumerate((*QKV, *O))}
_DELTA = dict(zip((DELTA_OUT, *DELTA_IN), (3, 0, 1, 2, 7), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder.

    fuses   linears that checkpoints have as one: QKV, or gate and up
    mlp     see `Facts`
    has_images  see `BaseShape`
    qkv_bias, o_bias, mlp_bias  whether these linears add a bias
    scheme  how the checkpoint stores its quantised linears; None: none is quantised
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    plan: Plan
    fuses: tuple[tuple[str, ...], ...] = ()
    mlp: tuple[str, ...] = MLP
    has_images: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    scheme: Fp8Scheme | Int4Scheme | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Return the rows of q_proj, which may have gates, too."""
        return self.q_size * (1 + self.plan.is_gated)

    @property
    def projection_widths(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of a layer with attention, in the order of `kernels.Projection`."""
        hidden, inner, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return (
            (hidden, self.q_rows),
            (hidden, kv),
            (hidden, kv),
            (self.q_size, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
            (0, 0),
        )

    @property
    def expert_widths(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of an expert, in the order of `kernels.Projection`; it has no attention."""
        assert self.plan.experts is not None
        hidden, inner = self.hidden_size, self.plan.experts.inner
        none = (0, 0)
        return none, none, none, none, (hidden, inner), (hidden, inner), (inner, hidden), none

    def shape(self, layer: int) -> LayerShape:
        """Return the shape of a layer with attention."""
        if self.plan.shapes:
            return self.plan.shapes[layer]
        window = self.window(layer)
        return LayerShape(self.head_dim, self.num_kv_heads, self.intermediate_size, window is None)

    def widths(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return (in, out) of a layer's linears, in the order of `kernels.Projection`."""
        if self.plan.shapes:
            return *self.shape(layer).widths(self.hidden_size, self.num_heads), (0, 0)
        delta = self.plan.delta
        if delta is None or layer not in self.plan.delta_layers:
            return self.projection_widths
        mixed, gates, rates, decays = ((self.hidden_size, out) for out in delta.widths)
        out, mlp = (delta.value_size, self.hidden_size), self.projection_widths[4:7]
        return mixed, gates, rates, out, *mlp, decays

    @property
    def widest(self) -> int:
        """Return the widest input or output of a layer's linears."""
        experts = () if self.plan.experts is None else self.expert_widths
        layers = (self.widths(layer) for layer in range(self.num_layers))
        return max(max(pair) for pairs in (*layers, experts) for pair in pairs)

    def linears(self, layer: int) -> Mapping[str, int]:
        """Return a layer's linears, in the model's order -> their `kernels.Projection`."""
        mixer = _DELTA if layer in self.plan.delta_layers else _ATTENTION
        linears = {**mixer, **{name: 4 + index for index, name in enumerate(self.mlp)}}
        widths = self.widths(layer)
        return {name: place for name, place in linears.items() if widths[place][1]}

    @property
    def num_kv_layers(self) -> int:
        """Return the number of layers that keep keys and values: those with attention."""
        return self.num_layers - len(self.plan.delta_layers)

    @property
    def kv_page(self) -> tuple[int, int, int]:
        """Return (layers, heads, width) of keys and values in a page."""
        if self.plan.shapes:
            return KvLayers(self.plan.shapes).page
        return self.num_kv_layers, self.num_kv_heads, self.head_dim

    @property
    def head_dims(self) -> int | tuple[int, ...]:
        """Return the width of a head: one, or each layer's."""
        return tuple(shape.head_dim for shape in self.plan.shapes) or self.head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of the scores."""
        scale = self.plan.attention_scale
        return self.head_dim**-0.5 if scale is None else scale

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token of this layer attends to, itself included; None: all."""
        return self.plan.windows[layer] if self.plan.windows else None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json and generation_config.json; raise UnsupportedModel naming the field."""
        fields = _read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = _read_json(generation_file) if generation_file.exists() else {}
        eos = generation.get("eos_token_id", fields.get("eos_token_id"))
        return cls.from_fields(fields, _text_of(fields).get("eos_token_id") if eos is None else eos)

    @classmethod
    def from_fields(
        cls, given: dict[str, Any], eos_token_id: int | list[int] | None
    ) -> ModelConfig:
        """Check a parsed config.json; raise UnsupportedModel naming the field."""
        outer, given = given, _text_of(given)
        family = given.get("model_type")
        if not isinstance(family, str) or family not in PLANS:
            raise UnsupportedModel(
                f"model_type is {family!r}; the decoder implements {', '.join(PLANS)}",
                param="model_type",
            )
        fields = Fields(given)
        vocab, hidden, num_layers, num_heads, max_positions = map(fields.size, _SIZES)
        facts = FAMILIES[family]
        inner = fields.size(facts.inner)
        for name in ("head_dim", "num_key_value_heads"):
            fields.size(name, 1)
        _check_kv_heads(fields, family)
        fields.flag("tie_word_embeddings")
        for bias in facts.biases:
            if bias.field is not None:
                fields.flag(bias.field)
        plan = PLANS[family](fields)
        if not plan.is_gelu:
            fields.activation()
        fields.refuse_unread()
        shape = BaseShape.from_config(outer)
        scalings = [each.scaling for each in plan.rotations if each is not None and each.scaling]
        max_positions = max(max_positions, *(scaling.max_positions for scaling in scalings), 0)
        max_positions = min(max_positions, plan.max_positions or max_positions)
        if all(window is None or window >= max_positions for window in plan.windows):
            plan = replace(plan, windows=())
        if num_heads % shape.kv_heads or shape.head_dim % 2:
            raise UnsupportedModel(
                f"config.json: {num_heads} attention heads must be a multiple of {shape.kv_heads} "
                f"key and value heads, and head_dim {shape.head_dim} must be even",
                param="num_key_value_heads",
            )
        eos = [] if eos_token_id is None else eos_token_id
        is_fp4 = plan.experts is not None and plan.experts.is_fp4  # and nothing else is quantised
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_positions=max_positions,
            tie_embeddings=shape.is_tied,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            plan=plan,
            fuses=shape.fuses,
            mlp=facts.mlp,
            has_images=shape.has_images,
            qkv_bias=shape.biased >= {*QKV},
            o_bias=shape.biased >= {*O},
            mlp_bias=shape.biased >= {*MLP},
            scheme=None if is_fp4 else read_scheme(given, _modules(num_layers, shape, plan)),
        )


def _text_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model alone."""
    if not has_images(given):
        return given
    known = _AROUND_TEXT | NEUTRAL
    known |= _AROUND_AUDIO if given["model_type"] == "gemma4" else frozenset()
    for name, value in given.items():
        is_known = name in known and name != "quantization_config"
        if value and not is_known:
            raise UnsupportedModel(f"config.json: {name} is not supported", param=name)
    try:
        return dict(text_config(given))
    except ValueError as error:
        raise UnsupportedModel(f"config.json: {error}", param="text_config") from error


def _check_kv_heads(fields: Fields, family: str) -> None:
    if family != "llama" and not fields.has("num_key_value_heads"):
        raise UnsupportedModel(
            "config.json: num_key_value_heads is missing", param="num_key_value_heads"
        )


def _modules(num_layers: int, shape: BaseShape, plan: Plan) -> list[str]:
    """Return the names of a decoder's modules, as checkpoints spell them."""
    parts = [*(shape.fused() if shape.fuses else shape).linears]
    parts += filter(None, plan.norms)
    layers = [f"model.layers.{i}.{part}" for i in range(num_layers) for part in parts]
    return ["lm_head", "model.embed_tokens", "model.norm", *layers]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{file} is not a JSON object")
    return fields
