"""Llama 2, 3, 3.1, 3.2, SmolLM2 and their like."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Plan


def read_plan(fields: Fields) -> Plan:
    return Plan(eps=fields.epsilon(), rotations=fields.rotations())
