"""The facts of each model family that an adapter has to fit, read without torch.

`engine.model.families` has a file for each, with the rest; both know the same names. What a
config.json leaves out is what it is to transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
O = ("self_attn.o_proj",)  # noqa: E741
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Linears that add a bias, if a field of config.json says so.

    field  None: they always do
    """

    linears: tuple[str, ...]
    field: str | None = None
    default: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a family has of its own.

    head_dim  the width of a head where config.json has none; None: hidden size / heads
    is_tied   whether the embedding is the last matrix, too, where config.json does not say
    fuses     linears that the family has as one, side by side: QKV, or gate and up
    """

    head_dim: int | None = None
    is_tied: bool = False
    fuses: tuple[tuple[str, ...], ...] = ()
    biases: tuple[Bias, ...] = ()

    def biased(self, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the linears that add a bias."""
        found: list[str] = []
        for bias in self.biases:
            given = None if bias.field is None else config.get(bias.field)
            if bias.field is None or (bias.default if given is None else given):
                found += bias.linears
        return frozenset(found)


GATE_UP = MLP[:2]
#: The module that such linears are.
FUSED = {QKV: "self_attn.qkv_proj", GATE_UP: "mlp.gate_up_proj"}

_ATTENTION = Bias(linears=QKV + O, field="attention_bias")
_MLP = Bias(linears=MLP, field="mlp_bias")

#: model_type -> its facts
FAMILIES = {
    "llama": Facts(biases=(_ATTENTION, _MLP)),
    "mistral": Facts(),
    "qwen2": Facts(biases=(Bias(linears=QKV),)),
    "qwen3": Facts(head_dim=128, biases=(_ATTENTION,)),
    "smollm3": Facts(is_tied=True, biases=(_ATTENTION, _MLP)),
    "granite": Facts(biases=(_ATTENTION, _MLP)),
    "phi3": Facts(fuses=(QKV, GATE_UP)),
    "olmo2": Facts(biases=(_ATTENTION,)),
    "gemma3_text": Facts(head_dim=256, is_tied=True, biases=(_ATTENTION,)),
    "seed_oss": Facts(
        head_dim=128,
        biases=(
            Bias(linears=QKV, field="attention_bias", default=True),
            Bias(linears=O, field="attention_out_bias"),
            _MLP,
        ),
    ),
    "ministral3": Facts(head_dim=128),
    "exaone4": Facts(),
    "glm4": Facts(
        head_dim=128,
        biases=(Bias(linears=QKV, field="attention_bias", default=True),),
        fuses=(GATE_UP,),
    ),
    "olmo3": Facts(biases=(_ATTENTION,)),
    "cohere2": Facts(is_tied=True, biases=(_ATTENTION,)),
}


def facts_of(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a config.json's family. Raises ValueError for a family not known."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}; these are known: {', '.join(FAMILIES)}")
    return FAMILIES[family]
