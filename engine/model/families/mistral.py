"""Mistral 7B, Nemo and their like: one sliding window for all layers, or none."""

from __future__ import annotations

from engine.model.fields import Fields
from engine.model.plan import Plan

_WINDOW = 4096  # where config.json has no sliding_window; null means none


def read_plan(fields: Fields) -> Plan:
    window = fields.take("sliding_window", None if fields.has("sliding_window") else _WINDOW)
    windows: tuple[int | None, ...] = ()
    if window is not None:
        size = fields.size("sliding_window", _WINDOW)
        windows = (size,) * len(fields.layers)
    return Plan(eps=fields.epsilon(), rotations=fields.rotations(), windows=windows)
