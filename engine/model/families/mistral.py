"""Mistral 7B, Nemo and their like: one sliding window for all layers, or none."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Plan

_WINDOW = 4096  # where config.json has no sliding_window; null means none


def read_plan(fields: Fields) -> Plan:
    windows = fields.one_window(_WINDOW)
    return Plan(eps=fields.epsilon(), rotations=fields.rotations(), windows=windows)
