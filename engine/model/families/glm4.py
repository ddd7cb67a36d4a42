"""GLM-4: norms on both sides; half of a head turns, each even dimension with the next."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Norms, Plan

_SHARE = 0.5
_NORMS = Norms(
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def read_plan(fields: Fields) -> Plan:
    share = fields.number("partial_rotary_factor", _SHARE)
    return Plan(
        eps=fields.epsilon(),
        rotations=fields.rotations(share=share, is_interleaved=True),
        norms=_NORMS,
    )
