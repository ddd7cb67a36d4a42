"""OLMo 2: norms after attention and MLP, none before, and one of all heads of q and of k."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Norms, Plan

#: The names of the norms, which Olmo 3 and Exaone 4 have, too.
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_plan(fields: Fields) -> Plan:
    return Plan(eps=fields.epsilon(), rotations=fields.rotations(), norms=AFTER, qk_norm="all")
