"""OLMo 3: OLMo 2 with sliding windows; scaled rotation in layers with full attention alone."""

from __future__ import annotations

from engine.model.families.olmo2 import AFTER
from engine.model.fields import FULL, SLIDING, Fields, windows_of
from engine.model.plan import Plan

_THETA = 500_000.0
_WINDOW, _PATTERN = 4096, 4


def read_plan(fields: Fields) -> Plan:
    types = fields.layer_types([SLIDING if (i + 1) % _PATTERN else FULL for i in fields.layers])
    return Plan(
        eps=fields.epsilon(),
        rotations=fields.rotations_by_type(types, _THETA, _THETA),
        windows=windows_of(types, fields.size("sliding_window", _WINDOW)),
        norms=AFTER,
        qk_norm="all",
    )
