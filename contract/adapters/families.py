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
    """

    head_dim: int | None = None
    is_tied: bool = False
    biases: tuple[Bias, ...] = ()

    def biased(self, config: Mapping[str, Any]) -> frozenset[str]:
        """Return the linears that add a bias."""
        found: list[str] = []
        for bias in self.biases:
            given = None if bias.field is None else config.get(bias.field)
            if bias.field is None or (bias.default if given is None else given):
                found += bias.linears
        return frozenset(found)


_ATTENTION = Bias(linears=QKV + O, field="attention_bias")
_MLP = Bias(linears=MLP, field="mlp_bias")

#: model_type -> its facts
FAMILIES = {
    "llama": Facts(biases=(_ATTENTION, _MLP)),
    "mistral": Facts(),
    "qwen2": Facts(biases=(Bias(linears=QKV),)),
    "qwen3": Facts(head_dim=128, biases=(_ATTENTION,)),
}


def facts_of(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a config.json's family. Raises ValueError for a family not known."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}; these are known: {', '.join(FAMILIES)}")
    return FAMILIES[family]
