"""SmolLM3: every fourth layer has no positions."""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Plan

_THETA = 2_000_000.0
_INTERVAL = 4


def read_plan(fields: Fields) -> Plan:
    interval = fields.size("no_rope_layer_interval", _INTERVAL)
    default = [int((i + 1) % interval != 0) for i in fields.layers]
    turns = fields.take("no_rope_layers", default)
    if not isinstance(turns, list) or len(turns) != len(default) or not set(turns) <= {0, 1}:
        raise UnsupportedModel(
            "config.json: no_rope_layers is not a list with 0 or 1 for each layer",
            param="no_rope_layers",
        )
    fields.take("max_window_layers")  # transformers does not read it
    window = fields.take("sliding_window")
    if fields.flag("use_sliding_window") and window is not None:
        window = fields.size("sliding_window")
    else:
        window = None
    types = [SLIDING if window is not None and not turn else FULL for turn in turns]
    rotations = fields.rotations(_THETA)
    return Plan(
        eps=fields.epsilon(),
        rotations=tuple(r if turn else None for r, turn in zip(rotations, turns, strict=True)),
        windows=windows_of(fields.layer_types(types), window),
    )
