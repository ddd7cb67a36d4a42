"""Plan: what a model's layers compute, as data.

A family's file (`engine.model.families`) makes it from config.json. The decoder, its form on a GPU
and the trainer all read it; what is not set is as in Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from contract.layer_shapes import LayerShape
from engine.model.rope import QueryGrowth, Rotation
from kernels.delta import DeltaShape
from kernels.experts import ExpertShape


class Norms(NamedTuple):
    """The names of a layer's norms in checkpoints; None: there is none at this place."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


LLAMA_NORMS = Norms()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arithmetic of a decoder's layers.

    eps              of all norms
    rotations        each layer's rotation of q and k; None: it has no positions
    windows          each layer's sliding window in tokens, None for full attention; empty: all
                     layers have full attention
    norms            before and after attention and MLP
    norm_offset      what is added to every norm's weight
    is_centred       whether the layers' norms and the last are LayerNorms (without a bias)
    is_parallel      whether attention and MLP read the same norm, and add to the same sum
    qk_norm          an RMSNorm of q and k before they are rotated: of each head, or of all heads as
                     one row; None: there is none
    activation       of the MLP
    embedding_scale, logit_scale  factors of the embeddings and of the logits
    attention_scale  factor of the scores; None: 1 / sqrt(width of a head)
    growth           factors of q by position; None: there are none
    is_gated         whether what a head attends to is multiplied by the sigmoid of a gate, which
                     q_proj has behind the head's q
    delta            of the layers that have a gated delta net in the place of attention, the
                     shape; None: there are none
    delta_layers     which they are
    has_sinks        whether each head of q has one more score, of a key without a value
    experts          of the layers that have them in the place of one MLP, the shape; None: there
                     are none
    expert_layers    which they are
    logit_cap        the logits are cut off smoothly there; None: they are not
    shapes           the layers' shapes, where they differ; values have then a norm, too, and a
                     layer's sums are multiplied by a number of its own
    per_layer        (vocabulary, width) of the layers' own embeddings; None: there are none
    unread           beginnings of the names of tensors that are not read
    max_positions    the context, if it is less than config.json's; None: it is not
    """

    eps: float
    rotations: tuple[Rotation | None, ...]
    windows: tuple[int | None, ...] = ()
    norms: Norms = LLAMA_NORMS
    norm_offset: float = 0.0
    is_centred: bool = False
    is_parallel: bool = False
    qk_norm: Literal["head", "all"] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    growth: QueryGrowth | None = None
    is_gated: bool = False
    delta: DeltaShape | None = None
    delta_layers: tuple[int, ...] = ()
    has_sinks: bool = False
    experts: ExpertShape | None = None
    expert_layers: tuple[int, ...] = ()
    logit_cap: float | None = None
    shapes: tuple[LayerShape, ...] = ()
    per_layer: tuple[int, int] | None = None
    unread: tuple[str, ...] = ()
    max_positions: int | None = None

    @property
    def on_a_cpu_alone(self) -> str:
        """Return the part of the layers that a GPU does not serve; empty: there is none."""
        if self.shapes:
            return "layers of several shapes"
        return "attention sinks" if self.has_sinks else ""

    @property
    def trained_on_a_cpu_alone(self) -> str:
        """Return the part of the layers that a GPU does not train; empty: there is none."""
        if self.on_a_cpu_alone or self.experts is not None:
            return self.on_a_cpu_alone or "experts"
        return "" if self.delta is None else "gated delta nets"

    @property
    def is_gelu(self) -> bool:
        return self.activation == "gelu_tanh"

    def embedded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, E] as the first layer reads them."""
        if self.embedding_scale == 1.0:
            return hidden
        # Rounded to the model's type, as Gemma does.
        return hidden * torch.tensor(self.embedding_scale, dtype=hidden.dtype).item()

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiply logits [N, V] by their factor, or cut them off."""
        if self.logit_cap is not None:
            return self.logit_cap * torch.tanh(logits / self.logit_cap)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
