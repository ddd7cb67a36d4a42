"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Plan


def read_plan(fields: Fields) -> Plan:
    fields.take("residual_dropout")
    return Plan(eps=fields.epsilon(), rotations=fields.rotations())
