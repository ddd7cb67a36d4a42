"""Qwen2 and Qwen2.5: some layers may have a sliding window."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Plan

_WINDOW = 4096
_FULL_LAYERS = 28


def read_plan(fields: Fields) -> Plan:
    return Plan(eps=fields.epsilon(), rotations=fields.rotations(), windows=read_windows(fields))


def read_windows(fields: Fields) -> tuple[int | None, ...]:
    """Read the window of each layer, as Qwen3 has it, too."""
    window: int | None = None
    is_null = fields.has("sliding_window") and fields.take("sliding_window") is None
    if fields.flag("use_sliding_window") and not is_null:
        window = fields.size("sliding_window", _WINDOW)
    num_full = fields.take("max_window_layers", _FULL_LAYERS)
    if not isinstance(num_full, int) or num_full < 0:
        raise UnsupportedModel(
            f"config.json: max_window_layers is {num_full!r}, not a whole number",
            param="max_window_layers",
        )
    layers = fields.layers
    default = [FULL if i < num_full or window is None else SLIDING for i in layers]
    return windows_of(fields.layer_types(default), window)
