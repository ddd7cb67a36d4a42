"""AdapterPlan: what a PEFT adapter changes in this base model, from its config and header.

An adapter that is accepted is applied exactly as PEFT applies it. `contract.adapters.fit` decides
whether it fits, here and at upload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from contract.adapters.base_shape import BaseShape, Experts
from contract.adapters.draft_heads import DraftHead
from contract.adapters.families import FUSED
from contract.adapters.fit import AdaptedMatrix, fit_adapter
from contract.adapters.problems import AdapterProblems
from contract.adapters.safetensors_header import ENGINE_MAX_BYTES, Tensor, read_header
from engine.adapters.config import check_config, mismatch
from engine.adapters.rows import Replacement, replacements
from engine.model.config import ModelConfig
from kernels import Projection

PROJECTION_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Indices of the two matrices outside the layers that an adapter may change: one comes before the
# first layer, the other after the last.
EMBEDDING, HEAD = 8, 9
_EXPERTS = re.compile(r"model\.layers\.([0-9]+)\.mlp\.experts\.(?:([0-9]+)\.)?([a-z_]+)")


class Site(NamedTuple):
    """One matrix of the base: a projection of a layer, or EMBEDDING or HEAD.

    expert  of the layer, whose matrix it is; None: of none
    """

    layer: int
    projection: int
    expert: int | None = None

    def widths(self, model: ModelConfig) -> tuple[int, int]:
        """Return (in, out) of the matrix; the embedding's `in` is the vocabulary."""
        if self.projection == EMBEDDING:
            return model.vocab_size, model.hidden_size
        if self.projection == HEAD:
            return model.hidden_size, model.vocab_size
        if self.expert is not None:
            return model.expert_widths[self.projection]
        return model.widths(self.layer)[self.projection]

    def has_bias(self, model: ModelConfig) -> bool:
        """Return whether the base adds a bias to the product."""
        if self.projection >= EMBEDDING or self.expert is not None:
            return False
        has_attention = self.layer not in model.plan.delta_layers
        mixer = *[model.qkv_bias and has_attention] * 3, model.o_bias and has_attention
        return (*mixer, *[model.mlp_bias] * 3, False)[self.projection]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(AdaptedMatrix):
    """One adapted matrix, and its tensors in the file.

    rows  those of B, of the magnitude and of the bias that are its own, where the tensors are those
          of a matrix that holds several; None: all
    """

    site: Site
    rows: slice | None = None

    @property
    def layer(self) -> int:
        return self.site.layer

    @property
    def projection(self) -> int:
        return self.site.projection

    def has_shift(self, model: ModelConfig) -> bool:
        """Return whether a vector is added to the product, see `AppliedValues`."""
        return self.bias is not None or (self.magnitude is not None and self.site.has_bias(model))

    @property
    def names(self) -> tuple[str, ...]:
        names = (self.a_name, self.b_name, self.magnitude, self.bias)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlan:
    """The changes that an adapter makes, and everything needed to place it in memory.

    targets     adapted projections of layers, in layer order
    embedding   the adapted token embedding; None: it has no LoRA
    head        the adapted LM head; None: it has no LoRA
    new_embedding, new_head   rows that replace the base's; LoRA is added to the new rows. Equal
                ones are stored once
    copies      tensors that PEFT writes beside an adapted embedding or head and that must equal a
                matrix of the base: tensor's name -> matrix
    is_tied     whether PEFT made the head's A and B from the embedding's; they must agree
    draft_heads what guesses further tokens, see `contract.adapters.draft_heads`
    num_experts of a layer; 0: it changes none
    """

    targets: tuple[Target, ...]
    embedding: Target | None = None
    head: Target | None = None
    copies: Mapping[str, Site]
    is_tied: bool = False
    new_embedding: Replacement | None = None
    new_head: Replacement | None = None
    draft_heads: tuple[DraftHead, ...] = ()
    num_experts: int = 0
    file_bytes: int

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """All targets, in the order in which a forward pass needs them."""
        ends = (self.embedding,), self.targets, (self.head,)
        return tuple(target for part in ends for target in part if target is not None)

    @property
    def max_rank(self) -> int:
        return max(target.rank for target in self.all_targets)


def parse_header(start: bytes, file_bytes: int) -> dict[str, Tensor]:
    """Return the tensors that the start of a safetensors file describes, by name.

    start       the file's first bytes, header included
    file_bytes  the file's size; the tensors must fill it exactly, without gap or overlap
    Raises AdapterMismatch on anything else.
    """
    try:
        tensors = read_header(start, file_bytes, ENGINE_MAX_BYTES)
    except AdapterProblems as found:
        raise mismatch(found) from found
    return {tensor.name: tensor for tensor in tensors}


def plan_adapter(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
    file_bytes: int = 0,
) -> AdapterPlan:
    """Return what the adapter changes in `model`; raise AdapterMismatch naming what does not fit.

    shapes  of the tensors in the file, by name
    """
    lora = check_config(config)
    try:
        fitted = fit_adapter(lora, shapes, base_shape(model))
    except AdapterProblems as found:
        raise mismatch(found) from found
    sites = sites_of(model)
    targets = [
        _target(site, matrix, rows)
        for module, matrix in fitted.matrices.items()
        for site, rows in _places(module, sites, model)
    ]
    ends = {target.projection: target for target in targets if target.projection >= EMBEDDING}
    new_embedding, new_head = replacements(fitted)
    of_experts = any(target.site.expert is not None for target in targets)
    return AdapterPlan(
        targets=tuple(target for target in targets if target.projection < EMBEDDING),
        embedding=ends.get(EMBEDDING),
        head=ends.get(HEAD),
        copies={name: sites[module] for name, module in fitted.copies.items()},
        is_tied=fitted.is_tied,
        new_embedding=new_embedding,
        new_head=new_head,
        draft_heads=fitted.draft_heads,
        num_experts=0 if model.plan.experts is None or not of_experts else model.plan.experts.num,
        file_bytes=file_bytes,
    )


def _places(
    module: str, sites: Mapping[str, Site], model: ModelConfig
) -> list[tuple[Site, slice | None]]:
    """Return the projections that a module is, and each one's rows; None: all."""
    of_experts = _EXPERTS.fullmatch(module)
    if of_experts is not None:
        layer, expert, name = of_experts.groups()
        return _expert_places(int(layer), expert, name, model)
    parts = next((parts for parts, name in FUSED.items() if module.endswith(name)), None)
    if parts is None:
        return [(sites[module], None)]
    found: list[tuple[Site, slice | None]] = []
    prefix, first = module.removesuffix(FUSED[parts]), 0
    for part in parts:
        site = sites[f"{prefix}{part}"]
        end = first + site.widths(model)[1]
        found.append((site, slice(first, end)))
        first = end
    return found


def _expert_places(
    layer: int, expert: str | None, name: str, model: ModelConfig
) -> list[tuple[Site, slice | None]]:
    """Return the same of a matrix of one expert, or of all."""
    assert model.plan.experts is not None
    num, inner = model.plan.experts.num, model.plan.experts.inner
    experts = range(num) if expert is None else (int(expert),)
    if name != "gate_up_proj":
        projection = PROJECTION_NAMES.index(name)
        return [(Site(layer, projection, each), None) for each in experts]
    parts = (Projection.GATE, slice(0, inner)), (Projection.UP, slice(inner, 2 * inner))
    return [(Site(layer, part, each), rows) for each in experts for part, rows in parts]


def _target(site: Site, matrix: AdaptedMatrix, rows: slice | None) -> Target:
    return Target(
        site=site,
        rows=rows,
        rank=matrix.rank,
        scaling=matrix.scaling,
        a_name=matrix.a_name,
        b_name=matrix.b_name,
        magnitude=matrix.magnitude,
        bias=matrix.bias,
        num_stacked=matrix.num_stacked,
    )


def sites_of(model: ModelConfig) -> dict[str, Site]:
    """Return every matrix that can be adapted, by its dotted path in Hugging Face's model."""
    found = {"model.embed_tokens": Site(-1, EMBEDDING)}
    for layer in range(model.num_layers):
        for linear, projection in model.linears(layer).items():
            found[f"model.layers.{layer}.{linear}"] = Site(layer, projection)
    return {**found, "lm_head": Site(model.num_layers, HEAD)}


def base_shape(model: ModelConfig) -> BaseShape:
    """Describe the model as `contract.adapters.fit` needs it."""
    delta_layers = model.plan.delta_layers
    experts, expert_layers = model.plan.experts, model.plan.expert_layers
    attention = next(i for i in range(model.num_layers) if i not in delta_layers)
    layer = {n: Site(attention, p) for n, p in model.linears(attention).items()}
    delta = {n: Site(i, p) for i in delta_layers[:1] for n, p in model.linears(i).items()}
    linears = {name: site.widths(model) for name, site in layer.items()}
    own: dict[int, dict[str, tuple[int, int]]] = {}
    for i in range(len(model.plan.shapes)):
        of_layer = {n: Site(i, p).widths(model) for n, p in model.linears(i).items()}
        own |= {i: of_layer} if of_layer != linears else {}
    return BaseShape(
        num_layers=model.num_layers,
        head_dim=model.head_dim,
        kv_heads=model.num_kv_heads,
        linears=linears,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        is_tied=model.tie_embeddings,
        biased=frozenset(name for name, site in layer.items() if site.has_bias(model)),
        fuses=model.fuses,
        has_images=model.has_images,
        delta_linears={name: site.widths(model) for name, site in delta.items()},
        delta_layers=delta_layers,
        own_linears=own,
        experts=None
        if experts is None or experts.has_biases
        else Experts(experts.num, experts.inner, expert_layers),
    )
