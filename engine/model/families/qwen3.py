"""Qwen3, dense: Qwen2 without biases, with a norm of each head's q and k."""

from __future__ import annotations

from engine.model.families.qwen2 import read_windows
from engine.model.fields import Fields
from engine.model.plan import Plan


def read_plan(fields: Fields) -> Plan:
    return Plan(
        eps=fields.epsilon(),
        rotations=fields.rotations(),
        windows=read_windows(fields),
        qk_norm="head",
    )
