"""EXAONE 4: norms after attention and MLP, one of each head; full layers have no positions."""

from __future__ import annotations

from engine.model.families.olmo2 import AFTER
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Plan

_PATTERN, _WINDOW = 4, 4096


def read_plan(fields: Fields) -> Plan:
    """Read the plan. Without a window, all layers are full, and all of them turn."""
    window = fields.window(_WINDOW)
    fields.take("sliding_window_pattern")  # words in published configs, which have layer_types
    default = [FULL] * len(fields.layers)
    if fields.take("layer_types") is None and window is not None:
        pattern = fields.size("sliding_window_pattern", _PATTERN)
        default = [SLIDING if (i + 1) % pattern else FULL for i in fields.layers]
    types = fields.layer_types(default)
    rotations = fields.rotations()
    return Plan(
        eps=fields.epsilon(),
        rotations=tuple(
            rotation if window is None or name == SLIDING else None
            for rotation, name in zip(rotations, types, strict=True)
        ),
        windows=windows_of(types, window),
        norms=AFTER,
        qk_norm="head",
    )
