"""The sizes of a base model that an adapter has to fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from contract.adapters.families import (
    DELTA_IN,
    DELTA_OUT,
    DELTA_SIZES,
    FUSED,
    MLP,
    QKV,
    STACKED,
    Facts,
    O,
    facts_of,
    has_images,
    text_config,
)
from contract.layer_shapes import gemma4_shapes

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


class Experts(NamedTuple):
    """A base's experts: their number in a layer, the width of each, and the layers with them."""

    num: int
    inner: int
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseShape:
    """The matrices of a base model that an adapter may change.

    head_dim, kv_heads  width of a head, and the number of those of keys and values
    linears          self_attn.q_proj … mlp.down_proj -> (in, out)
    delta_linears    the same of layers with a gated delta net
    delta_layers     these layers
    own_linears      the same of layers whose linears differ from those of the first
    hidden, vocab    sizes of the embedding and of the last matrix
    is_tied          those two are one, by the base's config
    biased           the linears that add a bias
    fuses            linears that the base has as one; adapters may name either
    has_images       it is the text model of one that sees images, or has its names: tensors
                     and adapters may say language_model
    experts          None: there are none
    expert_form      how an adapter names their matrices: all of a layer as one, or each; None: it
                     does not change them
    """

    num_layers: int
    head_dim: int
    kv_heads: int
    linears: Mapping[str, tuple[int, int]]
    hidden: int
    vocab: int
    is_tied: bool
    biased: frozenset[str] = frozenset()
    fuses: tuple[tuple[str, ...], ...] = ()
    has_images: bool = False
    delta_linears: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    delta_layers: tuple[int, ...] = ()
    own_linears: Mapping[int, Mapping[str, tuple[int, int]]] = dataclasses.field(
        default_factory=dict
    )
    experts: Experts | None = None
    expert_form: Literal["stacked", "apart"] | None = None

    def linears_of(self, layer: int) -> Mapping[str, tuple[int, int]]:
        """Return the linears of a layer, in the model's order."""
        linears = self.own_linears.get(layer, self.linears)
        if layer in self.delta_layers:
            linears = self.delta_linears
        if self.experts is None or layer not in self.experts.layers:
            return linears
        return {**linears, **self._expert_linears}

    @functools.cached_property
    def _expert_linears(self) -> Mapping[str, tuple[int, int]]:
        assert self.experts is not None
        into, out = (self.hidden, self.experts.inner), (self.experts.inner, self.hidden)
        if self.expert_form == "stacked":
            return dict(zip(STACKED, ((into[0], 2 * into[1]), out), strict=True))
        names = [name.removeprefix("mlp.") for name in MLP]
        return {
            f"mlp.experts.{expert}.{name}": widths
            for expert in range(self.experts.num if self.expert_form else 0)
            for name, widths in zip(names, (into, into, out), strict=True)
        }

    def num_stacked(self, module: str) -> int:
        """Return the number of experts whose matrices a module is; 1: it is one matrix."""
        if self.experts is None or not module.endswith(STACKED):
            return 1
        return self.experts.num

    def modules(self) -> Iterator[tuple[str, int | None, tuple[int, int]]]:
        """Return the dotted path of each module, its layer if it is in one, and (in, out)."""
        yield EMBEDDING, None, (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            for linear, widths in self.linears_of(layer).items():
                yield f"model.layers.{layer}.{linear}", layer, widths
        yield HEAD, None, (self.hidden, self.vocab)

    def fused(self) -> BaseShape:
        """Return the shape with the linears that the base has as one under that one's name."""
        linears: dict[str, tuple[int, int]] = {}
        for name, widths in self.linears.items():
            parts = next((parts for parts in self.fuses if name in parts), None)
            if parts is None:
                linears[name] = widths
            else:
                width_out = sum(self.linears[part][1] for part in parts)
                linears[FUSED[parts]] = widths[0], width_out
        return dataclasses.replace(self, linears=linears, biased=self.biased)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> BaseShape:
        """Read a Hugging Face config.json. Raises ValueError naming the field that is wrong."""
        outer, config = config, text_config(config)
        facts = facts_of(config)
        hidden = _size(config, "hidden_size")
        inner = _size(config, facts.inner)
        num_heads = _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", num_heads)
        head_dim = _size(config, "head_dim", facts.head_dim or hidden // num_heads)
        queries, keys = num_heads * head_dim, kv_heads * head_dim
        tied = config.get("tie_word_embeddings")
        gated = queries * (1 + facts.is_gated)
        widths = [(hidden, gated), (hidden, keys), (hidden, keys), (queries, hidden)]
        mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
        mlp = mlp[: len(facts.mlp)]
        linears = dict(zip((*QKV, *O, *facts.mlp), widths + mlp, strict=True))
        of_layers = _linears(config, hidden, num_heads) if facts.has_shapes else [linears]
        delta_layers, delta = facts.delta_layers(config), _delta_widths(config, hidden) + mlp
        return cls(
            num_layers=_size(config, "num_hidden_layers"),
            head_dim=head_dim,
            kv_heads=kv_heads,
            hidden=hidden,
            vocab=_size(config, "vocab_size"),
            is_tied=facts.is_tied if tied is None else bool(tied),
            biased=facts.biased(config),
            fuses=facts.fuses,
            has_images=has_images(outer) or facts.has_image_names,
            linears=of_layers[0],
            own_linears={i: own for i, own in enumerate(of_layers) if own != of_layers[0]},
            delta_linears=dict(zip((DELTA_OUT, *DELTA_IN, *facts.mlp), delta, strict=True))
            if delta_layers
            else {},
            delta_layers=delta_layers,
            experts=_experts(config, facts),
        )


def _experts(config: Mapping[str, Any], facts: Facts) -> Experts | None:
    if facts.experts is None:
        return None
    num = _size(config, "num_experts", _size(config, "num_local_experts", facts.experts[0]))
    inner = _size(config, "moe_intermediate_size", facts.experts[1])
    return Experts(num, inner, facts.expert_layers(config))


def _linears(
    config: Mapping[str, Any], hidden: int, num_heads: int
) -> list[dict[str, tuple[int, int]]]:
    """Return each layer's linears -> (in, out), where layers have several shapes."""
    names = (*QKV, *O, *MLP)
    widths = (shape.widths(hidden, num_heads) for shape in gemma4_shapes(config))
    return [
        {name: pair for name, pair in zip(names, each, strict=True) if pair[1]} for each in widths
    ]


def _delta_widths(config: Mapping[str, Any], hidden: int) -> list[tuple[int, int]]:
    """Return (in, out) of a gated delta net's linears, in the model's order."""
    numbers = {
        name: _size(config, f"linear_{name}", default) for name, default in DELTA_SIZES.items()
    }
    keys = numbers["num_key_heads"] * numbers["key_head_dim"]
    values = numbers["num_value_heads"] * numbers["value_head_dim"]
    heads = numbers["num_value_heads"]
    outs = (2 * keys + values, values, heads, heads)
    return [(values, hidden), *((hidden, out) for out in outs)]


def _size(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}, not a size")
    return value


def context_length(config: dict[str, Any]) -> int:
    """Return how many tokens, prompt and answer together, a base model reads.

    config  its config.json. YaRN stretches its original context by a factor, which configs that
            were published with it do not multiply out; LongRoPE is served within the original one.
    """
    try:
        config = dict(text_config(config))
    except ValueError:
        return 0
    length = int(config.get("max_position_embeddings") or 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope) if isinstance(rope, dict) else {}
    kind = rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings")
    if kind in ("longrope", "su"):
        return int(original or config.get("original_max_position_embeddings") or length)
    if kind != "yarn":
        return length
    original = original or length
    return max(length, int((rope.get("factor") or 1) * original))
